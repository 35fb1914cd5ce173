"""Mended defects, which can be put back: each replaces the mended functions by their old versions.

A scenario that finds these defects can find others like them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hicache_backends.file.eviction import EvictionSweep

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.attached_store import AttachedStore
from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.eviction import Entry
from hicache_storage.handoff import HandoffReceiver, HandoffSender
from hicache_storage.handoff.request import HandoffRequest
from hicache_storage.page_store.breaker import Breakers, Permit
from hicache_storage.page_store.call_guard import CallGuard, RunningCall
from hicache_storage.page_store.results import Outcome
from hicache_storage.page_store.settings import PageStoreSettings
from hicache_storage.page_store.storage_calls import Lane, Lanes
from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect, and the scenario that finds it."""

    text: str
    scenario: str
    found: str
    """A part of the finding's text."""
    replaced: Mapping[tuple[type, str], Callable[..., Any]]

    @contextmanager
    def put_back(self) -> Generator[None]:
        """Put the defect back into the code during the `with` block."""
        with ExitStack() as stack:
            for (owner, name), function in self.replaced.items():
                stack.enter_context(mock.patch.object(owner, name, function))
            yield


# --- unsaved pages are listed under the lock, and claimed under it again ---------------------------


def _claim_unsaved(cache: HostCache) -> list[Entry]:
    with cache._changed:
        entries = list(cache._entries.values())
    return cache.claim_for_writing(entries, uses=0)


def _claim_for_writing(cache: HostCache, entries: Iterable[Entry], uses: int) -> list[Entry]:
    with cache._changed:
        claimed = [
            entry
            for entry in entries
            if entry.uses >= uses and not entry.queued and entry.unsaved(cache.pool_set.written)
        ]
        for entry in claimed:
            entry.queued = True
            cache._allocator.pin(entry)
    return claimed


# --- a short scan runs under the lock of the candidates --------------------------------------------


def _look_further(sweep: EvictionSweep, deadline: Deadline) -> bool:
    with sweep._changed:
        if deadline.passed() or time.monotonic() < sweep._empty_until_s:
            return False
        sweep._look(Deadline(deadline.remaining_s() / 2))
        return True


# --- the end of a store does not report its losses -------------------------------------------------

_detach = AttachedStore.detach


def _detach_true(
    attached: AttachedStore, deadline: Deadline, *, drain: bool, unsaved: Sequence[Entry] = ()
) -> bool:
    _detach(attached, deadline, drain=drain, unsaved=unsaved)
    return True


# --- a cancelled request removes the completions of others -----------------------------------------


def _on_end(
    receiver: HandoffReceiver, request: HandoffRequest, outcome: str, *, taken: bool
) -> None:
    with receiver._changed:
        receiver._awaited.remove(request)
    receiver._counters.add(outcome)
    receiver._submit_cleanup(lambda: receiver._delete_used(request, list(request.awaited)))


# --- reads and writes share a breaker, and a call without pages counts as a success ---------------

_init_lanes = Lanes.__init__
_move_pages = Lane.move


def _init_with_one_breaker(
    lanes: Lanes, storage: HiCacheStorage, settings: PageStoreSettings
) -> None:
    _init_lanes(lanes, storage, settings)
    breaker = lanes.breakers.reads
    lanes.breakers = Breakers(breaker, breaker)
    lanes.writes.guard.breaker = breaker


def _move_no_pages(lane: Lane, transfers: Sequence[Any], deadline: Deadline) -> Outcome:
    if not any(len(transfer.hashes) for _, transfer in transfers):
        permit = lane.guard.admit()
        if permit is not None:
            permit.succeed()
    return _move_pages(lane, transfers, deadline)


# --- a request that stops waiting early is no evidence about the store -----------------------------


def _begin_uncounted(_: CallGuard, permit: Permit | None) -> RunningCall:
    return RunningCall(time.monotonic(), permit)


def _end_uncounted(_: CallGuard, __: RunningCall) -> None:
    pass


def _conclude(
    lane: Lane, permit: Permit, futures: Sequence[Future[Any]], deadline: Deadline
) -> None:
    if all(future.done() and not future.cancelled() for future in futures):
        _conclude_call(lane, permit, futures, deadline)
    elif deadline.timeout_s >= lane._timeout_s:
        permit.fail()
    else:
        permit.dismiss()


_conclude_call = Lane.conclude


# --- optional pools are written even if the required ones failed -----------------------------------


def _write_missing(sender: HandoffSender, hashes: Sequence[str], deadline: Deadline) -> None:
    pool_set = sender._controller.cache.pool_set
    missing = sender._missing(hashes, deadline)
    for part in (pool_set.required, pool_set.all_pools & ~pool_set.required):
        if any(bits & part for bits in missing):
            sender._write(hashes, [bits & part for bits in missing], deadline)


DEFECTS = {
    "wrong-bytes-in-l3": Defect(
        "unsaved pages leave L2 between their list and their claim: wrong bytes reach L3",
        "write-back",
        "a page",
        {
            (HostCache, "claim_unsaved"): _claim_unsaved,
            (HostCache, "claim_for_writing"): _claim_for_writing,
        },
    ),
    "scan-under-lock": Defect(
        "a scan that stalls holds the lock for which other writers and close wait",
        "victims",
        "a call took 15",
        {(EvictionSweep, "_look_further"): _look_further},
    ),
    "silent-losses": Defect(
        "detach and close return True after pages were dropped",
        "write-back",
        "close is True and has lost pages",
        {(AttachedStore, "detach"): _detach_true},
    ),
    "cancel-stalls-others": Defect(
        "cancelling on one decode engine deletes the completions that another one awaits",
        "handoff",
        "a request timed out",
        {(HandoffReceiver, "_on_end"): _on_end},
    ),
    "one-breaker": Defect(
        "overrun writes turn reads away",
        "breaker",
        "a read is Verdict.BREAKER_OPEN",
        {(Lanes, "__init__"): _init_with_one_breaker},
    ),
    "empty-calls-close-breakers": Defect(
        "a call without pages closes an open breaker",
        "breaker",
        "a breaker closed without a call that worked",
        {(Lane, "move"): _move_no_pages},
    ),
    "impatient-requests": Defect(
        "requests with short deadlines wait for a hung store for ever: the breaker never opens",
        "impatience",
        "the breaker never opened",
        {
            (CallGuard, "begin"): _begin_uncounted,
            (CallGuard, "end"): _end_uncounted,
            (Lane, "conclude"): _conclude,
        },
    ),
    "drafts-without-targets": Defect(
        "the sender of a hand-off writes drafts whose targets the store refused",
        "handoff",
        "a draft is written before its target",
        {(HandoffSender, "_write_missing"): _write_missing},
    ),
}
"""The defects by name."""
