"""KV-504: some calls proceed while others are held."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.scenarios.attempts import Caller
from hicache_conformance.scenarios.setup import fitting, no_server, open_store
from hicache_conformance.tools.network.proxy import FaultProxy, endpoints_in, redirected
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import HeldCall, Threads, held_get, held_set

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.run.outcomes import Violation
    from hicache_storage.keys import KeySpace

_PROCEED_LIMIT_S = 8.0
_MOST_HELD = 15
_CALL_LIMIT_S = 60.0
_NOTHING = f"nothing for {_PROCEED_LIMIT_S:.0f} s"


@check("KV-504")
def calls_proceed_while_others_are_held(case: Case) -> None:
    """As many calls as `parallelism` says run at once: while all but one are held, the last one ends."""
    store, space = open_store(case, 1024)
    kinds = [("get", "get"), ("set", "set"), ("set", "get"), ("get", "set")]
    for slow, quick in kinds[: 2 if case.quick else None]:
        _must_proceed(case, store, space, slow, quick)


@check("KV-504")
def a_call_proceeds_while_another_gets_no_answer(case: Case) -> None:
    """If the server leaves one call without an answer, other calls are still answered."""
    endpoints = endpoints_in(case.config)
    if not endpoints:
        raise no_server(case)
    with FaultProxy((endpoints[0].host, endpoints[0].port)) as proxy, Threads() as threads:
        store = case.open(redirected(case.config, {endpoints[0]: proxy.address}))
        space = case.space(fitting(case, 1024))
        store.open_space(space)
        pages = list(case.stored(store, space, 2))
        caller = Caller(store, space, _CALL_LIMIT_S)
        proxy.silence_one()
        # This get may fail, because its server does not answer.
        slow = threads.start(caller.get, pages[:1])
        if not wait_until(lambda: slow.done or proxy.held > 0, _PROCEED_LIMIT_S) or slow.done:
            raise NotVerified("calls do not go through the address in the config")
        quick = threads.start(caller.get, pages[1:])
        proceeded = quick.wait(_PROCEED_LIMIT_S)
        proxy.pass_through()
        attempt = quick.result()
        if not proceeded or attempt.error is not None:
            raise _blocked(store, "a get that the server does not answer", "get", attempt.text)


def _must_proceed(case: Case, store: Probe, space: KeySpace, slow: str, quick: str) -> None:
    """Hold one call fewer than the declared `parallelism`, then make one more, which must proceed."""
    count = min(case.claims.parallelism - 1, _MOST_HELD)
    pages = case.contents(space, case.hashes(count + 1))
    if "get" in (slow, quick):
        case.must_set(store, space, pages)
    hashes = list(pages)
    last = {hashes[-1]: pages[hashes[-1]]}
    calls: dict[str, Callable[[], object]] = {
        "get": partial(case.must_hold, store, space, last),
        "set": partial(case.must_set, store, space, last),
    }
    with Threads() as threads:
        for number, page_hash in enumerate(hashes[:-1]):
            held = _held(threads, store, space, slow, {page_hash: pages[page_hash]})
            if held.is_waiting:
                raise _blocked(store, _many(number, slow), slow, _NOTHING)
        call = threads.start(calls[quick])
        if not call.wait(_PROCEED_LIMIT_S):
            raise _blocked(store, _many(count, slow), quick, _NOTHING)
    store.delete(space, hashes)


def _held(
    threads: Threads, store: Probe, space: KeySpace, operation: str, page: dict[str, bytes]
) -> HeldCall[Any]:
    if operation == "get":
        return held_get(threads, store, space, list(page), limit_s=_PROCEED_LIMIT_S)
    return held_set(threads, store, space, page, limit_s=_PROCEED_LIMIT_S)


def _many(count: int, operation: str) -> str:
    return f"{count} of batch_{operation} that are held half way through their pages"


def _blocked(store: Probe, held: str, quick: str, got: str) -> Violation:
    return store.violation(
        f"batch_{quick} of another page waits for {held}",
        expected=f"an answer: the store declares parallelism {store.storage.capabilities.parallelism}",
        got=got,
    )
