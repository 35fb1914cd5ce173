"""Runs one check on one store, in a thread with a time limit, and records its outcome."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_conformance.case.case import Case, Forgot
from hicache_conformance.report.record import CheckRecord
from hicache_conformance.run.attribution import blamed
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Outcome, Unknown, Violation
from hicache_conformance.run.warnings_shown import few_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.checks import Check
    from hicache_conformance.run.subject import Subject

_TRIES = 5
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run."""

    seed: int = 0
    quick: bool = False
    call_limit_s: float = 60.0
    """How long one call of the store may take. A call that takes longer hangs."""
    check_limit_s: float = 300.0
    """How long a check may take whose calls all return. A check that takes longer is `unknown`."""


def run_check(
    make_subject: Callable[[], Subject], check: Check, options: RunOptions
) -> CheckRecord:
    """Run one check and return its record. Raise nothing except KeyboardInterrupt.

    A store that may forget pages gets several tries, because a page may be missing by design. So does
    one that had a short time limit while the machine ran something else for longer.
    """
    began_s = time.monotonic()
    with few_warnings():
        case, error = _watched(make_subject, check, options, 0)
        for attempt in range(1, _TRIES):
            if not (isinstance(error, Forgot) or _was_held_up(case, error)):
                break
            case, error = _watched(make_subject, check, options, attempt)
    return _record(check, case, error, time.monotonic() - began_s)


def _was_held_up(case: Case | None, error: BaseException | None) -> bool:
    return isinstance(error, Violation) and case is not None and case.was_held_up


def unfinished_record(check: Check, reason: str) -> CheckRecord:
    """Return the record of a check whose test was ended before the check was done."""
    return _record(check, None, Unknown(f"the test ended before the check: {reason}"), 0.0)


def _watched(
    make_subject: Callable[[], Subject], check: Check, options: RunOptions, attempt: int
) -> tuple[Case | None, BaseException | None]:
    """Run the check in a daemon thread, so that a store that hangs blocks only that thread."""
    run = _Run(make_subject, check, options, f"{options.seed}/{check.name}/{attempt}")
    thread = threading.Thread(target=run, name=f"check {check.name}", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + options.check_limit_s
    while thread.is_alive():
        thread.join(_POLL_S)
        case = run.case
        if case is not None and case.trace.longest_s() > options.call_limit_s:
            case.give_up()
            return case, _hang(case, thread, options.call_limit_s)
        if time.monotonic() > deadline_s:
            if case is not None:
                case.give_up()
            return case, Unknown(
                f"not done after {options.check_limit_s:.0f} s; {_where(thread) or 'no call hangs'}"
            )
    return run.case, run.error


class _Run:
    """The body of the thread that runs a check. The watching thread reads `case` and `error`."""

    def __init__(
        self, make_subject: Callable[[], Subject], check: Check, options: RunOptions, seed: str
    ) -> None:
        self.case: Case | None = None
        self.error: BaseException | None = None
        self._make_subject, self._check = make_subject, check
        self._options, self._seed = options, seed

    def __call__(self) -> None:
        try:
            case = Case(self._make_subject(), seed=self._seed, quick=self._options.quick)
            self.case = case
            with case:
                case.require(*self._check.rule.needs, *self._check.needs)
                self._check.run(case)
                case.look_again()
        except BaseException as error:  # noqa: BLE001 - every error is an outcome
            self.error = error


def _hang(case: Case, thread: threading.Thread, limit_s: float) -> Violation:
    return Violation(
        f"a call did not return within {limit_s:g} s",
        "an answer, or StorageTimeout within the configured timeout_s plus a second",
        _where(thread),
        tuple(case.trace.sequence()),
    )


def _where(thread: threading.Thread) -> str:
    """Return the innermost line that a thread has reached."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - there is no public way
    if frame is None:
        return ""
    last = traceback.extract_stack(frame)[-1]
    return f"stuck in {last.name}, {last.filename}:{last.lineno}"


_OUTCOMES: tuple[tuple[type[BaseException], Outcome], ...] = (
    (Violation, Outcome.FAILED),
    (NotDeclared, Outcome.NOT_DECLARED),
    (NotVerified, Outcome.NOT_VERIFIED),
    (Unknown, Outcome.UNKNOWN),
)


_OUTCOME_ERRORS = tuple(kind for kind, _ in _OUTCOMES)


def _record(
    check: Check, case: Case | None, error: BaseException | None, elapsed_s: float
) -> CheckRecord:
    outcome = Outcome.PASSED
    if error is not None and case is not None and not isinstance(error, _OUTCOME_ERRORS):
        error = blamed(error, case.subject.storage_class) or error
    if error is not None:
        outcome = next((one for kind, one in _OUTCOMES if isinstance(error, kind)), Outcome.ERROR)
    record = CheckRecord(
        name=check.name,
        title=check.title,
        outcome=outcome,
        stochastic=check.stochastic,
        elapsed_s=round(elapsed_s, 3),
        evidence=dict(case.evidence) if case else {},
    )
    if isinstance(error, Violation):
        return record.model_copy(
            update={
                "message": error.message,
                "expected": error.expected,
                "got": error.got,
                "sequence": tuple(error.sequence),
            }
        )
    if error is not None:
        text = str(error) if outcome is not Outcome.ERROR else _error_text(error)
        return record.model_copy(update={"message": text})
    return record


def _error_text(error: BaseException) -> str:
    """Return the type, the text and the origin of an error that is not a verdict."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
