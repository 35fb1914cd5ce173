"""KV-103: what clear and remove_space leave, and that they raise if they can't be finished."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.fault_path import FaultPath, foreign_exception, open_fault_path
from hicache_conformance.scenarios.lifecycle_actors import receive_result, use
from hicache_conformance.scenarios.setup import fitting, note, open_store, remove_space
from hicache_conformance.scenarios.small_stores import small_store
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.resources import no_free_descriptors
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_PAGES = 600
_PAGES_QUICK = 150
_SHARES = (0.0, 0.1, 0.4, 0.7, 0.95)
"""The connection is cut after these shares of the bytes that a whole clear moves."""
_LIMIT_S = 30.0
_TURNS = 3


@check("KV-103", Need.ENUMERABLE)
def a_clear_that_is_cut_short_says_so(case: Case) -> None:
    """If its connection breaks, clear raises unless it has removed every page."""
    with open_fault_path(case, 64, short_timeout=False) as path:
        caller = path.caller()
        pages = case.contents(path.space, case.hashes(_PAGES_QUICK if case.quick else _PAGES))
        _plant(path, caller, pages)
        up, down = _moved(path, "up"), _moved(path, "down")
        _clear(path, caller)
        whole = {"up": _moved(path, "up") - up, "down": _moved(path, "down") - down}
        for direction in ("up", "down"):
            for share in _SHARES[::2] if case.quick else _SHARES:
                _plant(path, caller, pages)
                nbytes = int(share * whole[direction])
                path.on_all(partial(FaultProxy.reset_after, nbytes=nbytes, direction=direction))
                attempt = _clear(path, caller)
                path.on_all(FaultProxy.pass_through)
                _must_be_true(path, caller, attempt, pages)


def _plant(path: FaultPath, caller: Caller, pages: Mapping[str, bytes]) -> None:
    hashes = list(pages)
    step = min(100, caller.probe.most_pages(path.space))
    for start in range(0, len(hashes), step):
        part = {one: pages[one] for one in hashes[start : start + step]}
        path.answer_of(partial(caller.set, part))


def _clear(path: FaultPath, caller: Caller) -> Attempt:
    clear = partial(caller.probe.storage.clear, path.space)
    return make_attempt(caller.probe, "clear", clear, limit_s=_LIMIT_S)


def _must_be_true(
    path: FaultPath, caller: Caller, attempt: Attempt, pages: Mapping[str, bytes]
) -> None:
    if attempt.error is not None:
        if not isinstance(attempt.error, HiCacheError):
            raise foreign_exception(attempt, path.case.trace.sequence("clear"))
        return
    hashes = list(pages)
    step = caller.probe.max_batch
    left = 0
    for start in range(0, len(hashes), step):
        seen: list[bool] = path.answer_of(partial(caller.exists, hashes[start : start + step]))
        left += sum(seen)
    if left:
        raise caller.probe.violation(
            f"clear returned {attempt.answer}, its connection had broken, and {left} of {len(pages)}"
            " pages are still there",
            expected="an exception, or a key space without a page",
            got=f"{attempt.answer}, and {left} pages",
            sequence=path.case.trace.sequence("clear"),
        )


def _moved(path: FaultPath, direction: str) -> int:
    return sum(proxy.bytes_up if direction == "up" else proxy.bytes_down for proxy in path.proxies)


@check("KV-103", Need.ENUMERABLE)
def a_clear_without_descriptors_says_so(case: Case) -> None:
    """If the process has no descriptor left, clear raises unless it has removed every page."""
    space = case.space(fitting(case, 64))
    pages = case.contents(space, case.hashes(20))
    result, error, left = receive_result(case.child(_clear_without_descriptors, space, pages))
    if left and not error:
        raise Violation(
            f"clear returned {result}, and {left} of {len(pages)} pages are still there",
            "an exception, or a key space without a page",
            f"{result}, and {left} pages",
            ("open, set 20 pages", "no descriptor is left", f"clear -> {result}", "exists -> True"),
        )


def _clear_without_descriptors(link: Link, space: KeySpace, pages: dict[str, bytes]) -> None:
    """Actor: send the answer of clear, whether it raised, and how many pages are left."""
    probe = link.open()
    use(probe, space)
    probe.set(space, pages)
    with no_free_descriptors():
        attempt = make_attempt(
            probe, "clear", partial(probe.storage.clear, space), limit_s=_LIMIT_S
        )
    left = sum(probe.exists(space, list(pages)))
    probe.clear(space)
    probe.close()
    link.send((attempt.text, attempt.error is not None, left))


@check("KV-103")
def a_removed_key_space_is_gone_and_no_other(case: Case) -> None:
    """`remove_space` removes the pages of a key space and its name, and nothing of another one."""
    store, space = open_store(case, 300)
    other = replace(space, tenant="stays")
    store.open_space(other)
    removed, kept = case.stored(store, space, 3), case.stored(store, other, 3)
    _must_count(case, store, space.id, 3, "3 pages were there")
    case.must_miss(store, space, list(removed), "was removed with its key space")
    case.must_hold(store, other, kept)
    if case.claims.enumerable and space in store.spaces():
        raise store.violation(
            "spaces() lists a key space that was removed",
            expected="the key spaces that are left",
            got=f"{space.id} among them",
        )
    _must_count(case, store, "0" * len(space.id), 0, "there is no such key space")
    store.open_space(space)
    case.must_set(store, space, removed)
    case.must_hold(store, space, removed)


@check("KV-103")
def a_removed_key_space_can_be_used_again(case: Case) -> None:
    """After `remove_space`, each handle that knew the key space can use it, and its remover lists it."""
    store, space = open_store(case, 300)
    handles = [store, case.open()] if case.claims.shared else [store]
    for turn in range(2 * len(handles)):
        handle, remover = handles[turn % len(handles)], handles[0]
        handle.open_space(space)
        pages = case.stored(handle, space, 3)
        case.must_hold(handle, space, pages)  # A handle may remember what it has seen.
        remove_space(remover, space.id)
        with note("its key space was removed since, and opened again"):
            handle.open_space(space)
            case.must_set(handle, space, pages)
            case.must_hold(handle, space, pages)
            if handle is remover and space not in handle.spaces():
                raise handle.violation("spaces() does not list a key space that holds pages")


@check("KV-103")
def a_removed_key_space_gives_its_room_back(case: Case) -> None:
    """After `remove_space`, a full store accepts as many pages as at first."""
    remove_space(case.open(), "0" * 32)
    small = small_store(case)
    small.require_kept()
    first, _ = small.fill()
    remove_space(small.probe, small.space.id)
    small.probe.open_space(small.space)
    again, _ = small.fill()
    why = "was filled, and whose key space was removed,"
    small.must_have_room_again(first, again, why, case.trace.sequence("remove_space"))


def _must_count(case: Case, store: Probe, space_id: str, pages: int, why: str) -> None:
    found = remove_space(store, space_id)
    if found not in range(pages if case.keeps else 0, pages + 1):
        raise store.violation(
            "remove_space does not return the number of pages that it removed",
            expected=f"{pages}: {why}",
            got=repr(found),
        )


@check("KV-103", Need.ENUMERABLE)
def clear_gives_its_room_back(case: Case) -> None:
    """After a clear, a full store accepts as many pages as at first, again and again."""
    small = small_store(case)
    small.require_kept()
    first, _ = small.fill()
    for turn in range(_TURNS):
        small.probe.clear(small.space)
        again, _ = small.fill()
        why = f"was filled and cleared {turn + 1} times"
        small.must_have_room_again(first, again, why, case.trace.sequence("clear"))
