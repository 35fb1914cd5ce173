"""KV-901: a call of a bounded store returns in time, and touches no page afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.fault_path import FaultPath, must_end_in_time, open_fault_path
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.content.memory import is_overwritten, overwrite
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.processes.resources import wait_until
from hicache_conformance.tools.processes.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt, Caller
    from hicache_conformance.tools.content.memory import PageMemory

_PAGES = 4
_WATCHED_S = 1.0
_CLAIM = "bounded is declared, and "


@check("KV-901", Need.BOUNDED)
def a_bounded_get_ends_in_time_and_lets_go_of_its_pages(case: Case) -> None:
    """If the server is silent, slow or stops half way, a get ends in time and writes nothing later."""
    with open_fault_path(case) as path:
        for why, fault in _faults(path).items():
            caller = path.caller()
            pages = path.stored_pages(caller, _PAGES)
            memory = caller.probe.memory(path.space, _PAGES)
            hashes = list(pages)[: caller.probe.most_pages(path.space)]
            get = partial(
                caller.probe.storage.batch_get, path.space, hashes, memory.pages[: len(hashes)]
            )
            must_end_in_time(
                path, _call_during(path, caller, "batch_get", get, fault), why, claim=_CLAIM
            )
            overwrite(memory.pages)
            path.on_all(FaultProxy.pass_through)
            _must_stay_unwritten(caller, memory, why)
            _delete(path, caller, pages)


@check("KV-901", Need.BOUNDED)
def a_bounded_set_ends_in_time_and_lets_go_of_its_pages(case: Case) -> None:
    """If the server is silent, slow or stops half way, a set ends in time and reads nothing later."""
    with open_fault_path(case) as path:
        for why, fault in _faults(path).items():
            caller = path.caller()
            pages = case.contents(
                path.space, case.hashes(min(_PAGES, caller.probe.most_pages(path.space)))
            )
            case.trace.stored[path.space].update(pages)
            memory = caller.probe.memory(path.space, len(pages)).filled_with(list(pages.values()))
            put = partial(caller.probe.storage.batch_set, path.space, list(pages), memory.pages)
            must_end_in_time(
                path, _call_during(path, caller, "batch_set", put, fault), why, claim=_CLAIM
            )
            overwrite(memory.pages)
            path.on_all(FaultProxy.pass_through)
            time.sleep(_WATCHED_S / 2)
            _must_be_right(path, caller, pages, why)
            _delete(path, caller, pages)


@dataclass(frozen=True, slots=True)
class _Fault:
    """How the network behaves during a call."""

    mode: Callable[[FaultProxy], object]
    falls_silent: bool = False
    """True if the network falls silent as soon as some bytes have passed."""


def _faults(path: FaultPath) -> dict[str, _Fault]:
    """Return the faults to try, each by its description."""
    page_nbytes_per_s = path.space.stored_nbytes / path.timeout_s
    return {
        "the server accepts and says nothing": _Fault(FaultProxy.go_silent),
        "the server drips": _Fault(partial(FaultProxy.drip, nbytes_per_s=page_nbytes_per_s / 8)),
        "the server falls silent half way": _Fault(
            partial(FaultProxy.drip, nbytes_per_s=page_nbytes_per_s), falls_silent=True
        ),
    }


def _call_during(
    path: FaultPath,
    caller: Caller,
    operation: str,
    call: Callable[[], list[bool]],
    fault: _Fault,
) -> Attempt:
    path.on_all(fault.mode)
    before = path.bytes_moved()
    with Threads() as threads:
        attempt = threads.start(
            partial(make_attempt, caller.probe, operation, call, limit_s=caller.limit_s)
        )
        if fault.falls_silent:
            wait_until(lambda: path.bytes_moved() > before, path.timeout_s / 2)
            path.on_all(FaultProxy.go_silent)
        return attempt.result()


def _must_stay_unwritten(caller: Caller, memory: PageMemory, why: str) -> None:
    def is_touched() -> bool:
        return not all(map(is_overwritten, memory.pages))

    if wait_until(is_touched, _WATCHED_S):
        raise caller.probe.violation(
            f"{_CLAIM}batch_get wrote into a page after it had returned, when {why}",
            expected="a store that touches no page after the call",
            got="bytes of the next user of the memory were overwritten",
            sequence=caller.probe.trace.sequence("batch_get"),
        )


def _must_be_right(path: FaultPath, caller: Caller, pages: Mapping[str, bytes], why: str) -> None:
    for page_hash, data in pages.items():
        (read,) = path.answer_of(partial(caller.get, [page_hash]))
        if read not in (None, data):
            with note(f"batch_set had returned and its memory was reused, when {why}"):
                raise path.case.wrong_bytes(caller.probe, path.space, page_hash, read, [data])


def _delete(path: FaultPath, caller: Caller, pages: Mapping[str, bytes]) -> None:
    """Delete pages again, because the store may be small."""
    path.answer_of(partial(caller.delete, list(pages)[: caller.probe.max_batch]))
