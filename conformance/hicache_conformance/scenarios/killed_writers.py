"""Reopens a store after a process that wrote to it was killed, and compares it with what was set."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_conformance.case.probe import ServerGone
from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_conformance.scenarios.contention import must_be_intact
from hicache_conformance.scenarios.fork_server import ForkServer
from hicache_conformance.scenarios.setup import fitting, no_files
from hicache_conformance.tools.network.proxy import endpoints_in
from hicache_conformance.tools.observation.files import DirectoryUsage
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_LEASE_LIMIT_S = 15.0
"""How long a leased lock may outlive its dead owner."""
_POLL_S = 0.05


def require_outlived(case: Case) -> None:
    """End the check if no process can see what a dead process has left."""
    if case.claims.shared or case.claims.durability >= Durability.CRASH:
        return
    space = case.space(fitting(case, 64), tenant="outlived")
    with case.open().storage as storage:
        storage.open_space(space)
        if DirectoryUsage.of(case.scratch.path).files:
            return
    raise NotDeclared("a page dies with its process: the store is neither shared nor durable")


def require_files(case: Case) -> None:
    """End the check if the store keeps nothing in files under the test's directory."""
    if str(case.scratch.path) not in str(case.config):
        raise no_files(case)
    store, space = case.open(), case.space(fitting(case, 64), tenant="files")
    store.open_space(space)
    case.stored(store, space, 1)
    if not DirectoryUsage.of(case.scratch.path).files:
        raise no_files(case)
    store.close()


def outlives_process(case: Case) -> bool:
    """Return whether the pages of a dead process must still be there."""
    return case.claims.durability >= Durability.CRASH


def keep_open_if_shared(case: Case, store: Probe) -> bool:
    """Close a store that claims not to be shared. Return whether it is still open."""
    if not case.claims.shared:
        store.close()
    return case.claims.shared


class KilledWriterScenario:
    """A store with a few pages, whose writers are killed and whose pages are then checked."""

    def __init__(self, case: Case, nbytes: int) -> None:
        self.case = case
        self.space = case.space(fitting(case, nbytes))
        self.fork_server = ForkServer(case)
        self._live = case.open(label="open before")
        self._live.open_space(self.space)
        self._kept = case.stored(self._live, self.space, 1)
        self._stays_open = keep_open_if_shared(case, self._live)
        self._outlives_writer = self._stays_open or outlives_process(case)

    def pages_to_write(self, versions: int) -> dict[str, list[bytes]]:
        """Return a fresh page with its possible contents. All contents but the last have been set."""
        hashes = self.case.hashes(1)
        contents = [self.case.contents(self.space, hashes, number) for number in range(versions)]
        if versions > 1:
            store = self._live if self._stays_open else reopen(self.case)
            store.open_space(self.space)
            for each in contents[:-1]:
                self.case.must_set(store, self.space, each)
            keep_open_if_shared(self.case, store)
        return {page_hash: [each[page_hash] for each in contents] for page_hash in hashes}

    def verify(self, pages: Mapping[str, Sequence[bytes]]) -> None:
        """Check the pages after their writer was killed, then set them again."""
        with must_keep_answering(self.case):
            self._verify(pages)

    def _verify(self, pages: Mapping[str, Sequence[bytes]]) -> None:
        fresh = reopen(self.case)
        fresh.open_space(self.space)
        for store in (fresh, self._live) if self._stays_open else (fresh,):
            must_be_intact_or_absent(self.case, store, self.space, pages)
            if self._outlives_writer:
                old = {h: contents for h, contents in pages.items() if len(contents) > 1}
                self.case.must_hold(store, self.space, {**self._kept, **old})
        must_accept(self.case, fresh, self.space, pages)
        fresh.delete(self.space, list(pages))  # A small store needs the room.
        fresh.close()


def reopen(case: Case, config: Mapping[str, object] | None = None) -> Probe:
    """Open a new handle. Repeat as long as the locks of a dead process may prevent that."""
    until_s = time.monotonic() + _LEASE_LIMIT_S
    while True:
        number = case.trace.began("from_config() after the kill")
        try:
            store = case.open(config)
        except Exception as error:
            case.trace.ended(number, f"raised {type(error).__name__}: {error}")
            if time.monotonic() > until_s:
                raise Violation(
                    "the store can't be opened after a process that wrote to it was killed",
                    "a store that opens",
                    f"{type(error).__name__}: {error}",
                    tuple(case.trace.sequence()),
                ) from error
            time.sleep(_POLL_S)
        else:
            case.trace.ended(number, "opened")
            return store


@contextmanager
def must_keep_answering(case: Case) -> Generator[None, None, None]:
    """Raise `Violation` if a store without a server stops answering after a kill."""
    try:
        yield
    except ServerGone as error:
        if endpoints_in(case.config):
            raise
        raise Violation(
            "the store does not answer any more after a process that wrote to it was killed",
            "an answer",
            str(error),
            tuple(case.trace.sequence()),
        ) from error


def must_be_intact_or_absent(
    case: Case, store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]]
) -> None:
    """Raise if a hit has none of the given contents."""
    must_be_intact(case, store, space, pages, store.get(space, list(pages)))


def kill_lengths(case: Case, space: KeySpace) -> list[int]:
    """Return file lengths at which to kill a writer, after the end of a file that is appended to."""
    nbytes = space.stored_nbytes
    near = [1, nbytes // 2, nbytes - 1, nbytes]
    if not case.quick:
        near += [0, 64, nbytes + 1, nbytes + 64, 4096]
    end = DirectoryUsage.of(case.scratch.path).longest_nbytes
    is_appended_to = end > 2 * nbytes
    return [end + each for each in near] + [0, nbytes // 2] if is_appended_to else near


def must_accept(
    case: Case, store: Probe, space: KeySpace, pages: Mapping[str, Sequence[bytes]]
) -> None:
    """Set the last contents of each page, and read them back. A dead owner's lock may delay this."""
    latest = {page_hash: contents[-1] for page_hash, contents in pages.items()}
    until_s = time.monotonic() + _LEASE_LIMIT_S
    while not all(store.set(space, latest)):
        if time.monotonic() > until_s:
            raise store.violation(
                "a page can't be set any more after a process that was writing it was killed",
                expected=f"True, after {_LEASE_LIMIT_S:.0f} s at the latest",
                got="False",
                sequence=case.trace.sequence(*(page_hash[:8] for page_hash in pages)),
            )
        time.sleep(_POLL_S)
    case.must_hold(store, space, pages)
