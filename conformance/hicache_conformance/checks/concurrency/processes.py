"""KV-502: several processes use one store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.contention import large_pages, must_be_intact
from hicache_conformance.scenarios.fork_server import HELD, ForkServer, write_half
from hicache_conformance.scenarios.remote_storage import open_remote
from hicache_conformance.scenarios.setup import fitting, note, open_store
from hicache_conformance.tools.content.content import content
from hicache_conformance.tools.processes.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Child, Link
    from hicache_storage.keys import KeySpace

_ANSWER_LIMIT_S = 120.0
_TURNS = 200
_STORM_NBYTES = 2 << 20
_STORM_S = 1.5


@check("KV-502")
def a_page_set_elsewhere_is_seen_at_once(case: Case) -> None:
    """A page that another process or handle sets is there at once, even if it was missed before."""
    for description, writer, reader, space in _pairs(case):
        for count in (1, 3):
            pages = case.contents(space, case.hashes(count))
            for _ in range(2):
                case.must_miss(reader, space, list(pages), "nobody has set")
            case.must_set(writer, space, pages)
            with note(description):
                case.must_hold(reader, space, pages)
            writer.delete(space, list(pages))


@check("KV-502")
def a_page_deleted_elsewhere_is_gone_at_once(case: Case) -> None:
    """A page that another process or handle deletes is gone at once, even if it was read or set here."""
    for description, writer, reader, space in _pairs(case):
        pages = case.stored(writer, space, 2)
        pages |= case.stored(reader, space, 2)
        for _ in range(2):
            reader.get(space, list(pages))
        writer.delete(space, list(pages))
        with note(description):
            case.must_miss(reader, space, list(pages), "was deleted elsewhere")


@check("KV-502", quick=False)
def a_page_deleted_elsewhere_can_be_set_again(case: Case) -> None:
    """After a page was set here and deleted elsewhere, it can be set here again."""
    for description, deleter, setter, space in _pairs(case):
        pages = case.stored(setter, space, 3)
        deleter.get(space, list(pages))
        deleter.delete(space, list(pages))
        with note(description):
            case.must_set(setter, space, pages)
            case.must_hold(deleter, space, pages)
            case.must_hold(setter, space, pages)
        setter.delete(space, list(pages))


@check("KV-502", Need.ENUMERABLE, quick=False)
def listings_show_what_others_set(case: Case) -> None:
    """If a process adds, removes or clears key spaces and pages, all processes list the change."""
    here, there = case.open(label="here"), open_remote(case, "another process")
    for one, other in ((here, there), (there, here)):
        space = case.space(fitting(case, 512), tenant=one.label)
        other.spaces()
        one.open_space(space)
        pages = case.stored(one, space, 4)
        if space not in other.spaces():
            raise other.violation(
                "spaces does not list a key space that another process has opened and filled",
                expected="the key space",
                got="others only",
            )
        other.open_space(space)
        deleted, *kept = pages
        one.delete(space, [deleted])
        _must_list(case, other, space, kept)
        one.clear(space)
        _must_list(case, other, space, [])
        case.must_miss(other, space, list(pages), "was cleared elsewhere")


@check("KV-502")
def a_set_half_way_in_another_process_mixes_with_nothing(case: Case) -> None:
    """While a set is half way in another process, its page and all pages that are set here are whole."""
    store, space = open_store(case, 8192)
    hashes = case.hashes(4)
    versions = [case.contents(space, hashes, version) for version in range(2)]
    pages = {page_hash: [each[page_hash] for each in versions] for page_hash in hashes}
    fork_server = ForkServer(case)
    for before in (7,) if case.quick else (7, 4, 0):
        shared = hashes[before % 2]
        other = fork_server.spawn(write_half, space, {}, {shared: versions[1][shared]}, before)
        other.receive()
        number = case.trace.began("another process: batch_set", [shared])
        message = other.receive()
        with Threads() as threads:
            setting = threads.attempt(case.must_set, store, space, versions[0])
            if setting.done:
                setting.result()
                case.must_hold(store, space, pages)
            if message == HELD:
                other.send("go on")
                message = other.receive()
        case.trace.ended(number, f"{message}, held in front of segment {before} of 8")
        case.must_hold(store, space, pages)
        store.delete(space, hashes)


@check("KV-502", stochastic=True)
def processes_that_write_one_page_leave_one_whole_page(case: Case) -> None:
    """While processes set the same pages, and afterwards, each of them reads whole pages."""
    count = 2 if case.quick else 4
    store = case.open()
    space, pages = large_pages(case, store, count=2, versions=count, most_nbytes=_STORM_NBYTES)
    children = [case.child(_set_and_get, space, list(pages), n, count) for n in range(count)]
    for child in children:
        child.receive()
    number = case.trace.began(f"{count} processes: batch_set and batch_get", list(pages))
    for child in children:
        child.send("go")
    reports = [_receive_report(case, child, store, space, pages) for child in children]
    case.trace.ended(number, f"{sum(one.turns for one in reports)} times")
    found = store.get(space, list(pages))
    must_be_intact(case, store, space, pages, found)
    if case.keeps and all(one.was_taken for one in reports):
        case.must_hold(store, space, pages)
    for is_there in (True, False):
        if not is_there:
            store.delete(space, list(pages))
        for child in children:
            child.send("read")
            hits = _receive_report(case, child, store, space, pages).hits
            if hits and not is_there:
                raise store.violation(
                    "a page that was deleted is still there for another process",
                    expected="misses",
                    got=f"{hits} hits",
                )


def _pairs(case: Case) -> list[tuple[str, Probe, Probe, KeySpace]]:
    """Return pairs of handles on one store. Each has a description and a key space open in both."""
    here, second = case.open(label="here"), case.open(label="second handle")
    there = open_remote(case, "another process")
    pairs = [
        ("by another process", there, here),
        ("for another process", here, there),
        ("by a second handle", second, here),
    ]
    spaces = [case.space(fitting(case, 1024), tenant=description) for description, _, _ in pairs]
    for space, (_, one, other) in zip(spaces, pairs, strict=True):
        one.open_space(space)
        other.open_space(space)
    return [(*pair, space) for pair, space in zip(pairs, spaces, strict=True)]


def _must_list(case: Case, store: Probe, space: KeySpace, hashes: Sequence[str]) -> None:
    listed = sorted(info.page_hash for info in store.scan(space))
    missing = set(hashes) - set(listed) if case.keeps else set[str]()
    if missing or set(listed) - set(hashes):
        raise store.violation(
            "scan does not list what another process has left",
            expected=f"{len(hashes)} pages",
            got=f"{len(listed)} pages, {len(missing)} missing",
        )


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process reports about the pages that it set and read."""

    turns: int = 0
    was_taken: bool = False
    """True if the last sets of the process returned True."""
    hits: int = 0
    wrong: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """The bytes of pages that match none of the versions."""


def _receive_report(
    case: Case, child: Child, store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]]
) -> _Report:
    reports: _Report = child.receive(_ANSWER_LIMIT_S)
    for page_hash, data in reports.wrong.items():
        raise case.wrong_bytes(store, space, page_hash, data, pages[page_hash])
    return reports


def _set_and_get(
    link: Link, space: KeySpace, hashes: Sequence[str], number: int, count: int
) -> None:
    """Actor: set and read pages in one version many times, then read them after each message."""
    probe = link.open(alone=False)
    probe.open_space(space)
    versions = [
        {h: content(space.id, h, space.stored_nbytes, version) for h in hashes}
        for version in range(count)
    ]
    link.send("ready")
    link.receive()
    turns, until_s = 0, time.monotonic() + _STORM_S
    wrong: dict[str, bytes] = {}
    while not wrong and turns < _TURNS and time.monotonic() < until_s:
        if not probe.storage.capabilities.overwrites and turns % 3 == number % 3:
            probe.delete(space, hashes)
        probe.set(space, versions[number])
        wrong = _seen(probe, space, versions).wrong
        turns += 1
    was_taken = all(probe.set(space, versions[number]))
    link.send(_Report(turns, was_taken, wrong=wrong))
    while True:
        link.receive()
        link.send(_seen(probe, space, versions))


def _seen(probe: Probe, space: KeySpace, versions: Sequence[Mapping[str, bytes]]) -> _Report:
    found = zip(versions[0], probe.get(space, list(versions[0])), strict=True)
    hits = {page_hash: data for page_hash, data in found if data is not None}
    wrong = {h: data for h, data in hits.items() if data not in [each[h] for each in versions]}
    return _Report(hits=len(hits), wrong=wrong)
