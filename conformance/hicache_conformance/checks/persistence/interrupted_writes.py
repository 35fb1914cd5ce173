"""KV-402: what a writer leaves when it is killed in the middle of a set."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.scenarios.fault_path import LEAST_NBYTES
from hicache_conformance.scenarios.fork_server import (
    HELD,
    ForkServer,
    open_within_the_limit,
    write_forever,
    write_half,
    write_until_the_limit,
)
from hicache_conformance.scenarios.killed_writers import (
    KilledWriterScenario,
    keep_open_if_shared,
    kill_lengths,
    must_accept,
    must_be_intact_or_absent,
    must_keep_answering,
    outlives_process,
    reopen,
    require_files,
    require_outlived,
)
from hicache_conformance.scenarios.setup import fitting, no_files, no_server
from hicache_conformance.tools.network.proxy import FaultProxy, endpoints_in, redirected
from hicache_conformance.tools.observation.files import DirectoryUsage, backdate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 12_000
_SEGMENTED_NBYTES = 16_384
_STORM_NBYTES = 6_000
_CALL_LIMIT_S = 60.0
_MONTH_S = 30 * 86_400.0
_CLEANING_LIMIT_S = 10.0
_POLL_S = 0.1


@check("KV-402")
def a_writer_killed_at_a_byte_leaves_the_page_absent_or_whole(case: Case) -> None:
    """If the kernel kills a writer at some byte, its page is absent or whole, and can be set."""
    require_files(case)
    _kill_at_bytes(case, versions=1)


@check("KV-402", quick=False)
def an_overwrite_killed_at_a_byte_leaves_old_or_new_bytes(case: Case) -> None:
    """If the kernel kills a writer at some byte of an overwrite, the page has old or new bytes."""
    require_files(case)
    _kill_at_bytes(case, versions=2)


@check("KV-402")
def a_writer_killed_half_way_through_a_page_leaves_it_absent_or_whole(case: Case) -> None:
    """If a writer is killed between two segments, its page is absent or whole, and can be set."""
    require_outlived(case)
    _kill_between_segments(case, versions=1)


@check("KV-402", quick=False)
def an_overwrite_killed_half_way_leaves_old_or_new_bytes(case: Case) -> None:
    """If a writer is killed between two segments of an overwrite, the page has old or new bytes."""
    require_outlived(case)
    _kill_between_segments(case, versions=2)


@check("KV-402", quick=False)
def a_writer_killed_while_it_opens_leaves_a_store_that_opens(case: Case) -> None:
    """If a process is killed while it creates a store, the store can be opened, and accepts pages."""
    if str(case.scratch.path) not in str(case.config):
        raise no_files(case)
    fork_server, space = ForkServer(case), case.space(fitting(case, 1024))
    limits = (0, 100) if case.quick else (0, 1, 20, 100, 1000, 4000)
    killed = 0
    for limit in limits:
        config = dict(case.subject.config(case.new_scratch()))
        early = case.contents(space, case.hashes(1))
        number = case.trace.began(
            f"process killed at byte {limit} of a file: from_config(), batch_set"
        )
        description = fork_server.spawn(
            open_within_the_limit, config, space, early, limit
        ).remaining_messages()
        case.trace.ended(number, description[0] if description else "killed")
        killed += not description
        with must_keep_answering(case):
            store = reopen(case, config)
            store.open_space(space)
            must_be_intact_or_absent(case, store, space, {h: [data] for h, data in early.items()})
            must_accept(case, store, space, {h: [data] for h, data in early.items()})
            store.close()
    case.evidence["killed"] = f"{killed} of {len(limits)}"


@check("KV-402", stochastic=True, quick=False)
def writers_killed_at_random_leave_pages_absent_or_whole(case: Case) -> None:
    """If a writer is killed at random among many sets, each page is absent or whole."""
    require_outlived(case)
    space = case.space(fitting(case, _STORM_NBYTES))
    versions = [case.contents(space, case.hashes(6))]
    versions += [case.contents(space, list(versions[0]), version) for version in (1, 2)]
    pages = {page_hash: [each[page_hash] for each in versions] for page_hash in versions[0]}
    store, fork_server = case.open(), ForkServer(case)
    store.open_space(space)
    keep_open_if_shared(case, store)
    taken: set[str] = set()
    rounds = 3 if case.quick else 6
    for _ in range(rounds):
        writer = fork_server.spawn(write_forever, space, pages, case.random.choice((1, 3)))
        for _ in range(case.random.randrange(12)):
            taken.update(writer.receive())
        for messages in writer.kill():
            taken.update(messages)
        case.trace.stored[space].update(taken)
        with must_keep_answering(case):
            fresh = reopen(case)
            fresh.open_space(space)
            must_be_intact_or_absent(case, fresh, space, pages)
            if outlives_process(case) and case.keeps:
                case.must_hold(fresh, space, {page_hash: pages[page_hash] for page_hash in taken})
            fresh.close()
    case.evidence["killed"] = f"{rounds} times"
    last = reopen(case)
    last.open_space(space)
    must_accept(case, last, space, pages)


@check("KV-402")
def a_connection_cut_in_a_set_leaves_the_page_absent_or_whole(case: Case) -> None:
    """If a connection is cut in the middle of a set, other handles find the page whole or not at all."""
    endpoints = endpoints_in(case.config)
    if not endpoints:
        raise no_server(case)
    direct = case.open(label="direct")
    endpoint = endpoints[0]
    with FaultProxy((endpoint.host, endpoint.port)) as proxy:
        config = redirected(case.config, {endpoint: proxy.address})
        writer = case.open(config, label="through the proxy")
        space = case.space(fitting(case, _PAGE_NBYTES))
        for store in (direct, writer):
            store.open_space(space)
        before = proxy.bytes_up
        case.stored(writer, space, 1)
        cost = proxy.bytes_up - before
        if cost < LEAST_NBYTES:
            raise NotVerified("sets do not go through the address in the config")
        near_the_end = cost - min(cost, space.stored_nbytes) // 4
        cuts = [0, 1, cost // 2, cost - 1, cost, 12, cost // 4, near_the_end]
        for nbytes in cuts[: 4 if case.quick else None]:
            for versions in (1, 2):
                cut = partial(proxy.reset_after, nbytes)
                _cut(case, Caller(writer, space, _CALL_LIMIT_S), direct, cut, versions)
                proxy.pass_through()


@check("KV-402", quick=False)
def killed_writers_leave_nothing_that_grows(case: Case) -> None:
    """What killed writers leave behind does not grow with the number of kills."""
    require_files(case)
    kills = 2 if case.quick else 3
    scenario = KilledWriterScenario(case, _PAGE_NBYTES)
    pages = scenario.pages_to_write(1)
    limit = kill_lengths(case, scenario.space)[1]
    _must_not_grow(case, scenario, partial(_killed_at, case, scenario, pages, limit), kills=kills)
    _must_not_grow(case, scenario, partial(_killed_half_way, case, scenario, pages, 7), kills=kills)


def _kill_at_bytes(case: Case, *, versions: int) -> None:
    if versions > 1 and not case.claims.overwrites:
        raise NotDeclared("overwrites is declared False: a set of a present page writes nothing")
    scenario = KilledWriterScenario(case, _PAGE_NBYTES)
    limits = kill_lengths(case, scenario.space)
    killed = 0
    for limit in limits:
        pages = scenario.pages_to_write(versions)
        killed += _killed_at(case, scenario, pages, limit)
        scenario.verify(pages)
    case.evidence["killed"] = f"{killed} of {len(limits)}"
    if not killed:
        raise NotVerified(
            "no writer was killed: no set made a file longer than the limit (it may write into files"
            " that are there already, or through a mapping)"
        )


def _killed_at(
    case: Case, scenario: KilledWriterScenario, pages: Mapping[str, Sequence[bytes]], limit: int
) -> bool:
    """Set pages in a process that dies when a file exceeds `limit`. Return True if it died."""
    new = {page_hash: contents[-1] for page_hash, contents in pages.items()}
    line = f"process killed at byte {limit} of a file: batch_set"
    number = case.trace.began(line, list(new))
    messages = scenario.fork_server.spawn(
        write_until_the_limit, scenario.space, new, limit
    ).remaining_messages()
    case.trace.ended(number, messages[0] if messages else "killed")
    case.trace.stored[scenario.space].update(new)
    return not messages


def _kill_between_segments(case: Case, *, versions: int) -> None:
    scenario = KilledWriterScenario(case, _SEGMENTED_NBYTES)
    held = 0
    for before in (7,) if case.quick else (0, 1, 4, 7):
        pages = scenario.pages_to_write(versions)
        held += _killed_half_way(case, scenario, pages, before)
        scenario.verify(pages)
    case.evidence["killed"] = f"{held} times in the middle"


def _killed_half_way(
    case: Case, scenario: KilledWriterScenario, pages: Mapping[str, Sequence[bytes]], before: int
) -> bool:
    """Set a page in a process that is killed before a segment. Return True if it got that far."""
    new = {page_hash: contents[-1] for page_hash, contents in pages.items()}
    line = f"process killed in front of segment {before} of 8: batch_set"
    number = case.trace.began(line, list(new))
    writer = scenario.fork_server.spawn(write_half, scenario.space, {}, new, before)
    writer.receive()
    messages = writer.receive()
    case.trace.ended(number, "killed" if messages == HELD else messages)
    case.trace.stored[scenario.space].update(new)
    writer.kill()
    return bool(messages == HELD)


def _cut(case: Case, writer: Caller, direct: Probe, cut: Callable[[], None], versions: int) -> None:
    """Set a page over a connection that is cut in the set. Read the page through another handle."""
    space, hashes = writer.space, case.hashes(1)
    contents = [case.contents(space, hashes, version) for version in range(versions)]
    for each in contents[:-1]:
        case.must_set(direct, space, each)
    cut()
    writer.set(contents[-1])
    allowed = {page_hash: [each[page_hash] for each in contents] for page_hash in hashes}
    must_be_intact_or_absent(case, direct, space, allowed)
    if versions > 1:
        case.must_hold(direct, space, allowed)
    must_accept(case, direct, space, allowed)
    direct.delete(space, hashes)


def _must_not_grow(
    case: Case, scenario: KilledWriterScenario, kill: Callable[[], object], *, kills: int
) -> None:
    """Kill some writers and measure, then kill twice as many more and measure again."""
    usages: list[DirectoryUsage] = []
    for times in (kills, 2 * kills):
        for _ in range(times):
            kill()
        usages.append(_cleaned(case, scenario.space))
    first, second = usages
    case.evidence["left"] = f"{first} after {kills} kills, {second} after {3 * kills}"
    if _has_grown(case, scenario, first, kills) and not _shrinks(case, scenario, first, kills):
        raise Violation(
            "what killed writers leave behind grows with every one that is killed",
            f"about as much after {3 * kills} kills as after {kills}: {first}",
            str(DirectoryUsage.of(case.scratch.path)),
            tuple(case.trace.sequence()),
        )


def _has_grown(
    case: Case, scenario: KilledWriterScenario, first: DirectoryUsage, kills: int
) -> bool:
    """Return True if each of the `2 * kills` kills since `first` seems to have left something."""
    now = DirectoryUsage.of(case.scratch.path)
    nbytes = kills * scenario.space.stored_nbytes // 2
    return now.files - first.files >= 2 * kills or now.nbytes - first.nbytes >= nbytes


def _shrinks(case: Case, scenario: KilledWriterScenario, first: DirectoryUsage, kills: int) -> bool:
    """Return True if the growth since `first` comes from every set, or disappears by itself."""
    backdate(case.scratch.path, _MONTH_S)  # Some stores remove only files that are old.
    usages = [_cleaned(case, scenario.space) for _ in range(2 * kills)]
    if usages[-1].nbytes - usages[0].nbytes > (usages[0].nbytes - first.nbytes) // 2:
        return True  # A log grows with every set and is compacted later.
    until_s = time.monotonic() + _CLEANING_LIMIT_S
    # A store may clean up in the background.
    while _has_grown(case, scenario, first, kills):
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def _cleaned(case: Case, space: KeySpace) -> DirectoryUsage:
    """Open, use and close the store again. Return how many bytes its directory uses."""
    store = reopen(case)
    store.open_space(space)
    pages = case.contents(space, case.hashes(1))
    must_accept(case, store, space, {page_hash: [data] for page_hash, data in pages.items()})
    store.delete(space, list(pages))
    store.close()
    return DirectoryUsage.of(case.scratch.path)
