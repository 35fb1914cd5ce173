"""KV-301, KV-302: a closed storage stays closed, and has released everything."""

from __future__ import annotations

import statistics
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import (
    Attempt,
    Caller,
    call_at_once,
    error_text,
    make_attempt,
)
from hicache_conformance.scenarios.fault_path import open_fault_path, without_server
from hicache_conformance.scenarios.lifecycle_actors import (
    Growth,
    failing_calls,
    failures,
    growth,
    leftovers,
    memory,
    receive_result,
    run_in_process,
    small_space,
)
from hicache_conformance.tools.network.proxy import FaultProxy
from hicache_conformance.tools.observation.files import files_under, looks_temporary
from hicache_conformance.tools.processes.child import Child
from hicache_conformance.tools.processes.threads import Threads
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_LIMIT_S = 20.0
"""How long close may take: 10 s in the contract, and more on a busy machine."""
_REFUSAL_LIMIT_S = 10.0
"""How long a call on a closed storage may take. It has nothing to wait for."""
_TURNS_LIMIT_S = 5.0
_CLOSERS = 4
_CALLERS = 3
_WARM_UP_ROUNDS = 10
_TIMEOUTS = 4
_LEAK_NBYTES = 8 << 20
_ROUND_NBYTES = 1 << 20
_ROUND_PAGES = 256
"""The most pages that a round uses, because even small pages take time."""


@check("KV-301")
def every_method_after_close_raises_storage_closed(case: Case) -> None:
    """After close, every method except close raises StorageClosed."""
    probe, space = case.open(), small_space(case)
    probe.open_space(space)
    probe.storage.register_buffer(buffer := bytearray(4096))
    pages = case.stored(probe, space, 2)
    probe.close()
    unknown = case.space(space.page_nbytes, tenant="never opened")
    for where, known in ((space, True), (unknown, False)):
        caller = Caller(probe, where, _REFUSAL_LIMIT_S)
        hashes = list(pages) if known else case.hashes(2)
        for attempt in (
            caller.exists(hashes),
            caller.get(hashes),
            caller.set(case.contents(where, hashes)),
            caller.delete(hashes),
            *_other_calls(probe, where, buffer),
        ):
            _must_be_closed(probe, attempt)


def _other_calls(probe: Probe, space: KeySpace, buffer: bytearray) -> list[Attempt]:
    storage = probe.storage
    calls: dict[str, Callable[[], Any]] = {
        "open_space": lambda: storage.open_space(space),
        "spaces": lambda: list(storage.spaces()),
        "scan": lambda: list(storage.scan(space)),
        "page_times": lambda: storage.page_times(space, []),
        "faults": lambda: list(storage.faults(space)),
        "unreadable_spaces": lambda: list(storage.unreadable_spaces()),
        "remove_space": lambda: storage.remove_space(space.id),
        "clear": lambda: storage.clear(space),
        "diagnose": storage.diagnose,
        "parts": storage.parts,
        "stats": storage.stats,
        "register_buffer": lambda: storage.register_buffer(buffer),
        "unregister_buffer": lambda: storage.unregister_buffer(buffer),
    }
    return [
        make_attempt(probe, name, call, limit_s=_REFUSAL_LIMIT_S) for name, call in calls.items()
    ]


def _must_be_closed(probe: Probe, attempt: Attempt) -> None:
    if not isinstance(attempt.error, StorageClosed):
        result = f"raised {type(attempt.error).__name__}" if attempt.error else "did not raise"
        raise probe.violation(
            f"{attempt.operation} after close {result}",
            expected="StorageClosed: `self.ensure_open()` as the first line of every method",
            got=attempt.text,
            sequence=["store.close() -> None", f"store.{attempt.operation}(...) -> {attempt.text}"],
        )


@check("KV-301")
def closing_twice_is_fine(case: Case) -> None:
    """A second close does nothing, whether the storage was used or not."""
    for used in (True, False):
        probe = case.open(label="used" if used else "unused")
        if used:
            space = small_space(case)
            probe.open_space(space)
            case.stored(probe, space, 2)
        for _ in range(3):
            _must_close(probe)


@check("KV-301")
def threads_may_close_at_once(case: Case) -> None:
    """Several threads may close a storage at the same time."""
    for _ in _rounds(3 if case.quick else 8):
        probe, space = case.open(), small_space(case)
        probe.open_space(space)
        case.stored(probe, space, 1)
        closing: Callable[[], None] = partial(_must_close, probe)
        call_at_once([closing] * _CLOSERS)
        _must_be_closed(probe, Caller(probe, space, _REFUSAL_LIMIT_S).exists(case.hashes(1)))


@check("KV-301")
def closing_ends_the_calls_that_are_running(case: Case) -> None:
    """If close runs during a call, the call gives a right answer or raises StorageClosed."""
    for operation in ("batch_get", "batch_set"):
        probe, space = case.open(), small_space(case)
        probe.open_space(space)
        ((page_hash, data),) = case.stored(probe, space, 1).items()
        held_memory = probe.memory(space, 1, 8).filled_with([data])
        call = getattr(probe.storage, operation)
        with Threads() as threads:
            half_way = partial(_outcome, call, space, page_hash)
            held = threads.hold(half_way, held_memory.pages[0])
            closing = threads.attempt(partial(_must_close, probe))
            outcome = held.release()
            closing.result()
        _must_be_allowed(case, probe, operation, outcome)
        if outcome == [True] and held_memory.pages[0].tobytes() != data:
            raise case.wrong_bytes(probe, space, page_hash, held_memory.pages[0].tobytes(), [data])


def _outcome(call: Callable[..., Any], space: KeySpace, page_hash: str, page: Any) -> Any:
    """Return the result or the exception of the call."""
    try:
        return call(space, [page_hash], [page])
    except Exception as error:  # noqa: BLE001 - the caller judges it
        return error


def _must_be_allowed(case: Case, probe: Probe, operation: str, outcome: Any) -> None:
    if isinstance(outcome, Exception) and not isinstance(outcome, StorageClosed):
        raise probe.violation(
            f"{operation} raised {type(outcome).__name__} when the storage was closed during the call",
            expected="the right answer, a miss or StorageClosed: nothing is wrong with the store",
            got=error_text(outcome),
            sequence=case.trace.sequence("close"),
        )


@check("KV-301")
def close_stops_the_calls_of_busy_threads(case: Case) -> None:
    """Threads that make calls during close get right pages or misses, then StorageClosed."""
    for _ in _rounds(2 if case.quick else 5):
        probe, space = case.open(), small_space(case)
        probe.open_space(space)
        pages = case.stored(probe, space, 2)
        warm = threading.Semaphore(0)
        with Threads() as threads:
            callers = [
                threads.start(partial(_call_until_closed, case, probe, space, pages, warm))
                for _ in range(_CALLERS)
            ]
            for _ in callers:
                warm.acquire(timeout=_LIMIT_S)
            _must_close(probe)
            for caller in callers:
                caller.result()


def _call_until_closed(
    case: Case, probe: Probe, space: KeySpace, pages: dict[str, bytes], warm: threading.Semaphore
) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    turn = 0
    try:
        while _one_call(case, probe, space, pages, turn):
            turn += 1
            if turn == _CALLERS:
                warm.release()
            if time.monotonic() > deadline_s:
                raise probe.violation(
                    "calls go on after close", expected="StorageClosed", got="no exception"
                )
    finally:
        warm.release()


def _one_call(
    case: Case, probe: Probe, space: KeySpace, pages: dict[str, bytes], turn: int
) -> bool:
    """Read a page, or in every third turn set it. Return False once the storage is closed."""
    page_hash, data = list(pages.items())[turn % 2]
    operation = "batch_set" if turn % 3 == 2 else "batch_get"
    memory_of_turn = probe.memory(space, 1).filled_with([data])
    call = getattr(probe.storage, operation)
    outcome = _outcome(call, space, page_hash, memory_of_turn.pages[0])
    if isinstance(outcome, StorageClosed):
        return False
    _must_be_allowed(case, probe, operation, outcome)
    found = memory_of_turn.pages[0].tobytes()
    if outcome == [True] and found != data:
        raise case.wrong_bytes(probe, space, page_hash, found, [data])
    return True


@check("KV-301")
def close_leaves_nothing_behind(case: Case) -> None:
    """Close leaves no thread, socket, descriptor, child process or temporary file behind."""
    temporary = case.new_scratch().path
    used, unused = run_in_process(case, leftovers, small_space(case), str(temporary))
    for left, calls in ((used, "open, use by four threads, close"), (unused, "open, close")):
        if left:
            raise Violation(
                f"close leaves {_counted(left)} behind",
                expected="nothing that was not there before the storage was opened, within 10 s",
                got=", ".join(left[:5]),
                sequence=[calls],
            )
    files = [*files_under(temporary), *filter(looks_temporary, files_under(case.scratch.path))]
    if files:
        raise Violation(
            "close leaves a temporary file behind",
            expected="no file in the directory for temporary files, and none with a name like one",
            got=", ".join(sorted(path.name for path in files)[:5]),
            sequence=["open, use, close"],
        )


@check("KV-302")
def opening_and_closing_keeps_threads_and_descriptors(case: Case) -> None:
    """Opening, using and closing leaves no thread, descriptor, process or object, however often."""
    found: Growth = run_in_process(case, growth, small_space(case), 10 if case.quick else 50)
    grown = len(found.left) >= found.rounds // 2
    if grown or found.uncollected >= found.rounds // 2:
        kind = (
            _counted(found.left)
            if grown
            else f"{found.uncollected} storages that can't be collected"
        )
        raise Violation(
            f"every open and close leaves something: {kind} after {found.rounds} rounds",
            expected="nothing that grows with the rounds",
            got=", ".join(found.left[:5]) or "something still refers to each closed storage",
            sequence=["open, use, close", f"... {found.rounds} times"],
        )


@check("KV-302", quick=False)
def openings_that_fail_leave_nothing(case: Case) -> None:
    """If a storage can't be opened, because of its config or its server, nothing is left behind."""
    wrong = [{**case.config, "conformance_no_such_field": 1}]
    elsewhere = without_server(case.config)
    if elsewhere is not None:
        wrong.append(elsewhere)
    rounds = 10 if case.quick else 30
    left: list[str] = run_in_process(case, failures, wrong, rounds)
    if len(left) >= rounds // 2:
        raise Violation(
            f"every attempt to open it that fails leaves something: {_counted(left)} after"
            f" {rounds * len(wrong)} attempts",
            "nothing that grows with the attempts",
            ", ".join(left[:5]),
            ("from_config(a config that can't be opened)", f"... {rounds} times"),
        )


@check("KV-302", quick=False)
def calls_that_fail_leave_nothing(case: Case) -> None:
    """Calls that fail because the server is away leave no thread, descriptor or process behind."""
    left = _left_by_failing_calls(case, FaultProxy.refuse, 20)
    if len(left) >= 10:
        raise _leak(left, "fails", "without a server, 20 times each")


@check("KV-302", quick=False)
def calls_that_time_out_leave_nothing(case: Case) -> None:
    """Calls that fail because the server is silent leave no thread, descriptor or process behind."""
    left = _left_by_failing_calls(case, FaultProxy.go_silent, _TIMEOUTS)
    if len(left) >= _TIMEOUTS:
        raise _leak(left, "times out", f"with a silent server, {_TIMEOUTS} times each")


def _left_by_failing_calls(
    case: Case, fault: Callable[[FaultProxy], object], rounds: int
) -> list[str]:
    """Return what a process keeps after calls of each kind have failed `rounds` times."""
    with (
        open_fault_path(case, 64) as path,
        Child(
            case.subject.storage_class,
            path.config,
            failing_calls,
            path.space,
            rounds,
            absent=case.absent,
        ) as child,
    ):
        receive_result(child)
        path.on_all(fault)
        child.send("the server is away")
        receive_result(child)
        path.on_all(FaultProxy.drop_held)
        path.on_all(FaultProxy.pass_through)
        child.send("the server is there")
        left: list[str] = receive_result(child)
        return left


def _leak(left: Sequence[str], how: str, calls: str) -> Violation:
    return Violation(
        f"every call that {how} leaves something: {_counted(left)}",
        "nothing that grows with the calls",
        ", ".join(left[:5]),
        ("open, use", f"batch_exists, batch_get, batch_set and batch_delete {calls}"),
    )


@check("KV-302", quick=False)
def opening_and_closing_keeps_memory(case: Case) -> None:
    """Resident memory does not grow when a storage is opened, used and closed again and again."""
    page_nbytes = min(256 << 10, case.claims.max_page_nbytes or 256 << 10)
    space = case.space(page_nbytes)
    pages = min(_ROUND_NBYTES // page_nbytes, _ROUND_PAGES)
    samples: list[int] = run_in_process(case, memory, space, pages, 60)
    if _keeps_growing(samples[_WARM_UP_ROUNDS:]):
        more: list[int] = run_in_process(case, memory, space, pages, 110)
        if _keeps_growing(more[_WARM_UP_ROUNDS:]):
            grown_mib = (more[-1] - more[_WARM_UP_ROUNDS]) / (1 << 20)
            raise Violation(
                f"resident memory grows by {grown_mib:.0f} MiB in 100 rounds of open, use, close",
                expected="memory that stays the same after the first rounds",
                got=", ".join(f"{one >> 20} MiB" for one in more[::20]),
                sequence=["open, use, close", "... 110 times"],
            )
    grown_kib = (samples[-1] - samples[_WARM_UP_ROUNDS]) >> 10
    case.evidence["growth of resident memory in 50 rounds"] = f"{grown_kib} KiB"


def _rounds(count: int) -> Iterator[int]:
    """Yield up to `count` numbers, but stop earlier if the rounds take long."""
    until_s = time.monotonic() + _TURNS_LIMIT_S
    for turn in range(count):
        if time.monotonic() < until_s:
            yield turn


def _keeps_growing(samples: Sequence[int]) -> bool:
    """Return True if the growth is large enough to matter and continues in both halves of the time."""
    fifth = len(samples) // 10
    middle = len(samples) // 2
    first, half, last = (
        statistics.median(samples[start : start + fifth])
        for start in (0, middle, len(samples) - fifth)
    )
    grown = last - first
    return grown > _LEAK_NBYTES and min(half - first, last - half) > grown / 4


def _must_close(probe: Probe) -> None:
    attempt = make_attempt(probe, "close", probe.storage.close, limit_s=_LIMIT_S)
    if attempt.error is not None:
        raise probe.violation(f"close raised {type(attempt.error).__name__}", got=attempt.text)


def _counted(left: Sequence[str]) -> str:
    """Count the lines by the kind that they begin with, such as "2 threads and 1 descriptor"."""
    kinds = ("thread", "descriptor", "child process")
    counts = {kind: sum(line.startswith(kind) for line in left) for kind in kinds}
    description = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
    return " and ".join(description).replace("processs", "processes")
