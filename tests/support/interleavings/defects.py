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
from hicache_backends.tiered.copier import Copier, Copies
from hicache_backends.tiered.moves import Move, Moves, Scope

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.composition.member import Member, PendingCall, noting
from hicache_storage.composition.member import _Doubts as Doubts
from hicache_storage.composition.member import _Local as MemberLocal
from hicache_storage.controller.attached_store import AttachedStore
from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.eviction import Entry
from hicache_storage.handoff import HandoffReceiver, HandoffSender
from hicache_storage.handoff.request import HandoffRequest
from hicache_storage.keys import KeySpace
from hicache_storage.page_store.begun import Call
from hicache_storage.page_store.breaker import Breakers, Permit
from hicache_storage.page_store.call_guard import CallGuard, RunningCall
from hicache_storage.page_store.results import Outcome
from hicache_storage.page_store.settings import PageStoreSettings
from hicache_storage.page_store.spaces import OpenSpaces
from hicache_storage.page_store.storage_calls import Lane, Lanes


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


def _init_with_one_breaker(lanes: Lanes, spaces: OpenSpaces, settings: PageStoreSettings) -> None:
    _init_lanes(lanes, spaces, settings)
    breaker = lanes.breakers.reads
    lanes.breakers = Breakers(breaker, breaker)
    lanes.writes.guard.breaker = breaker


def _move_no_pages(lane: Lane, transfers: Sequence[Any], deadline: Deadline) -> Call[Outcome]:
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
    lane: Lane, permit: Permit, futures: Sequence[Future[Any]], hang_s: float | None = None
) -> None:
    if all(future.done() and not future.cancelled() for future in futures):
        _conclude_call(lane, permit, futures, hang_s)
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


# --- copies between tiers and removals: each of the steps that bring them in order is left out -------

_removal = Moves.removal
_copy_unawaited = Copier.copy_unawaited


def _cancel_nothing(_: Move, __: frozenset[str] | None) -> None:
    pass


@contextmanager
def _removal_without_wait(
    moves: Moves, scope: Scope, space_id: str, hashes: Sequence[str] | None, _: Deadline
) -> Generator[set[str]]:
    with _removal(moves, scope, space_id, hashes, Deadline(0.0)):
        yield set()


def _begin_wanted(moves: Moves, scope: Scope, space_id: str, hashes: Sequence[str]) -> Move:
    move = Move(scope, space_id, hashes)
    with moves._changed:
        moves._moves.add(move)
    return move


@contextmanager
def _removal_that_is_forgotten(
    moves: Moves, scope: Scope, space_id: str, hashes: Sequence[str] | None, deadline: Deadline
) -> Generator[set[str]]:
    with _removal(moves, scope, space_id, hashes, deadline) as left:
        yield left
    with moves._changed:
        for move in moves._of(scope, space_id):
            move.is_canceled = move.is_canceled and hashes is not None
            move.canceled -= frozenset(hashes or ())


def _copy_and_release(
    copier: Copier, members: Sequence[Member], copies: Copies, counter: str
) -> None:
    _copy_unawaited(copier, members, copies, counter)
    copies.room.release()


def _begin_copy(
    copier: Copier, member: Member, copies: Copies, deadline: Deadline
) -> tuple[list[int], PendingCall[list[bool]]] | None:
    move, space = copies.move, copies.space
    wanted = copier._moves.begin_write(move, copies.hashes)
    kept = [copies.hashes[n] for n in wanted]
    undone = set[str]()

    def end(_: object = None) -> None:
        while canceled := copier._moves.end_write(move, kept, undone):
            undone.update(canceled)
            with noting([]):
                member.delete(space, canceled)

    if not kept:
        end()
        return None
    try:
        pages = [copies.pages[n] for n in wanted]
        call = copier.memory.lend(
            copies.room, member, lambda: member.begin_set(space, kept, pages), deadline
        )
    except BaseException:
        end()
        raise
    call.future.add_done_callback(end)
    return wanted, call


def _heal(_: Copier, member: Member, space: KeySpace, hashes: Sequence[str]) -> None:
    with noting([]):
        member.delete(space, hashes)


# --- a call that is under way at the close of a composition starts threads --------------------------


def _executor_after_close(local: MemberLocal, guard: CallGuard) -> DaemonExecutor:
    with local._lock:
        found = local._executors.get(guard)
        if found is None:
            found = DaemonExecutor(f"hicache {local._label}", local._threads)
            local._executors[guard] = found
    return found


# --- doubts about writes end too early --------------------------------------------------------------

_begin_delete = Member.begin_delete


def _begin_delete_late(
    member: Member, space: KeySpace, hashes: Sequence[str]
) -> PendingCall[list[bool]]:
    call = _begin_delete(member, space, hashes)

    def settle(gone: list[bool]) -> list[bool]:
        doubts = member._local.get().doubts
        return doubts.resolve(space, hashes, doubts.ended(space, hashes), gone)

    call._settle = settle
    return call


def _doubt_the_last(
    doubts: Doubts, space: KeySpace, hashes: Sequence[str], write: Future[list[bool]] | None
) -> None:
    with doubts._lock:
        doubts._writes.update({(space, each): [write] if write else [] for each in hashes})


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
    "moves-ignore-removals": Defect(
        "copies between tiers go on although their pages are removed",
        "tiers",
        "a page has returned after its removal",
        {(Move, "cancel"): _cancel_nothing},
    ),
    "delete-does-not-wait": Defect(
        "a delete does not wait for a copy that a tier is storing",
        "tiers",
        "a page has returned after its removal",
        {(Moves, "removal"): _removal_without_wait},
    ),
    "moves-that-begin-during-a-removal": Defect(
        "a copy is made of a page that was read during its removal",
        "tiers",
        "a page has returned after its removal",
        {(Moves, "begin"): _begin_wanted},
    ),
    "removals-forgotten": Defect(
        "a copy under way is not undone after a delete gave up",
        "tiers",
        "a page has returned after its removal",
        {(Moves, "removal"): _removal_that_is_forgotten},
    ),
    "copies-released-twice": Defect(
        "the memory of copies is released twice",
        "tiers",
        "is written under a hash that is not its own",
        {(Copier, "copy_unawaited"): _copy_and_release},
    ),
    "copies-undone-by-engines": Defect(
        "a set undoes a copy in the engine's thread, and waits for a hung tier",
        "tiers",
        "a set of",
        {(Copier, "begin_copy"): _begin_copy},
    ),
    "healed-by-engines": Defect(
        "a get deletes wrong copies in the engine's thread, and waits for a hung tier",
        "tiers",
        "a get of",
        {(Copier, "heal"): _heal},
    ),
    "threads-after-close": Defect(
        "a call that is under way at the close starts threads, which stay",
        "tiers",
        "no thread can run",
        {(MemberLocal, "executor"): _executor_after_close},
    ),
    "doubts-end-with-deletes": Defect(
        "a delete ends the doubts about a write that has ended after it",
        "stripes",
        "a page has returned after its removal",
        {(Member, "begin_delete"): _begin_delete_late},
    ),
    "one-doubtful-write": Defect(
        "of two writes of a page that still run, the first one is forgotten",
        "stripes",
        "a page has returned after its removal",
        {(Doubts, "add"): _doubt_the_last},
    ),
}
"""The defects by name."""
