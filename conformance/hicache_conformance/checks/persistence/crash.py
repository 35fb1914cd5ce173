"""KV-401: pages survive SIGKILL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.fork_server import (
    HELD,
    ForkServer,
    write_half,
    write_until_the_limit,
)
from hicache_conformance.scenarios.killed_writers import (
    keep_open_if_shared,
    kill_lengths,
    must_keep_answering,
    reopen,
)
from hicache_conformance.scenarios.remote_storage import kill_after_next_call, open_remote, serve
from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.observation.files import DirectoryUsage

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace


@check("KV-401")
def pages_survive_sigkill_of_their_writer(case: Case) -> None:
    """Pages of several key spaces are there and whole after the process that set them was killed."""
    spaces = [
        case.space(fitting(case, 1024)),
        case.space(fitting(case, 100), pool="draft"),
        case.space(fitting(case, 4000), pool="mamba"),
    ]
    reader = case.open(label="open before")
    stays_open = keep_open_if_shared(case, reader)
    writer = _writer(case, ForkServer(case))
    kept: dict[KeySpace, dict[str, bytes]] = {}
    for space in spaces:
        for opened in (writer, reader) if stays_open else (writer,):
            opened.open_space(space)
        kept[space] = case.stored(writer, space, 1)
        kept[space] |= case.stored(writer, space, 5)
    kill_after_next_call(writer)
    kept[spaces[0]] |= case.stored(writer, spaces[0], 1)
    _must_be_kept(case, kept, (reader,) if stays_open else ())


@check("KV-401", quick=False)
def a_page_survives_a_kill_right_after_its_verdict(case: Case) -> None:
    """A page of any size is there even if its writer was killed as soon as the set returned True."""
    fork_server = ForkServer(case)
    for nbytes in (64, 8192) if case.quick else (1, 64, 4097, 8192, 30_000):
        space = case.space(fitting(case, nbytes), tenant=str(nbytes))
        for count in (1, 3) if nbytes < 8192 else (1,):
            writer = _writer(case, fork_server)
            writer.open_space(space)
            kill_after_next_call(writer)
            pages = case.stored(writer, space, min(count, writer.max_batch))
            store = reopen(case)
            store.open_space(space)
            case.must_hold(store, space, pages)
            store.delete(space, list(pages))  # A small store needs the room.
            store.close()


@check("KV-401", quick=False)
def an_overwritten_page_survives_a_kill(case: Case) -> None:
    """If a writer was killed while it overwrote a page, the page has its old or its new bytes."""
    space = case.space(fitting(case, 8192))
    writer = _writer(case, ForkServer(case))
    writer.open_space(space)
    old = case.stored(writer, space, 3)
    new = case.contents(space, list(old), version=1)
    case.must_set(writer, space, dict(list(new.items())[:2]))
    kill_after_next_call(writer)
    case.must_set(writer, space, dict(list(new.items())[2:]))
    store = reopen(case)
    store.open_space(space)
    case.must_hold(store, space, {page_hash: (old[page_hash], new[page_hash]) for page_hash in old})


@check("KV-401", quick=False)
def a_deleted_page_stays_deleted_after_a_kill(case: Case) -> None:
    """A deleted page stays gone even if its deleter was killed as soon as the delete returned True."""
    space = case.space(fitting(case, 1024))
    fork_server = ForkServer(case)
    kept: dict[str, bytes] = {}
    deleted: list[str] = []
    for dies_before in (False, True):
        writer = _writer(case, fork_server)
        writer.open_space(space)
        pages = case.stored(writer, space, 6)
        if dies_before:  # Another process deletes the pages.
            kill_after_next_call(writer)
            writer.exists(space, list(pages)[:1])
            writer = _writer(case, fork_server)
            writer.open_space(space)
        hashes = list(pages)
        verdicts = writer.delete(space, hashes[:1])
        kill_after_next_call(writer)
        verdicts += writer.delete(space, hashes[1:2])
        deleted += [h for h, ok in zip(hashes[:2], verdicts, strict=True) if ok]
        kept |= {page_hash: pages[page_hash] for page_hash in hashes[2:]}
    store = reopen(case)
    store.open_space(space)
    case.must_miss(store, space, deleted, "was deleted before the process that did it was killed")
    case.must_hold(store, space, kept)
    case.must_set(store, space, case.contents(space, deleted))
    case.must_hold(store, space, case.contents(space, deleted))


@check("KV-401", quick=False)
def a_kill_in_a_set_takes_no_other_page_with_it(case: Case) -> None:
    """If a process is killed in the middle of a set, the pages that were there before stay."""
    space = case.space(fitting(case, 6000))
    kept: dict[str, bytes] = {}
    fork_server = ForkServer(case)
    for before in (4,) if case.quick else (1, 4, 7):
        batch = case.contents(space, case.hashes(1))
        late = case.contents(space, case.hashes(1))
        writer = fork_server.spawn(write_half, space, batch, late, before)
        verdicts = writer.receive()
        kept |= _noted(
            case, space, {h: batch[h] for h, ok in zip(batch, verdicts, strict=True) if ok}
        )
        if writer.receive() == HELD:
            writer.kill()
        _must_be_kept(case, {space: kept})
    if not DirectoryUsage.of(case.scratch.path).files:
        return
    for limit in kill_lengths(case, space)[:4]:
        late = case.contents(space, case.hashes(1))
        fork_server.spawn(write_until_the_limit, space, late, limit).remaining_messages()
        _must_be_kept(case, {space: kept})


def _writer(case: Case, fork_server: ForkServer) -> Probe:
    return open_remote(case, "killed later", fork_server.spawn(serve))


def _noted(case: Case, space: KeySpace, pages: dict[str, bytes]) -> dict[str, bytes]:
    """Record pages that an actor has set, as a probe records its own. Return them."""
    case.trace.footprint += [space.stored_nbytes] * len(pages)
    case.trace.stored[space].update(pages)
    return pages


def _must_be_kept(
    case: Case, kept: dict[KeySpace, dict[str, bytes]], others: tuple[Probe, ...] = ()
) -> None:
    """Check the pages through open handles, through a new one, and through another after its close."""
    for space, pages in kept.items():
        for store in others:
            case.must_hold(store, space, pages)
    for _ in range(2):
        with must_keep_answering(case):
            store = reopen(case)
            for space, pages in kept.items():
                store.open_space(space)
                case.must_hold(store, space, pages)
            store.close()
