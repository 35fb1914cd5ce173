"""What can come of a check, a rule and a run; and how a check says so.

A check returns when its fact holds. Otherwise it raises one of these:

    Violation      the store breaks the rule                            -> failed
    NotDeclared    the store does not claim what the rule is about      -> not_declared
    NotVerified    the claim is made, the means to test it are missing  -> not_verified
    Unknown        the test ran and could not decide                    -> unknown

Anything else that it raises is a mistake of the kit or of its surroundings: `error`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Outcome(enum.StrEnum):
    """Of one check, or of all the checks of a rule."""

    FAILED = "failed"
    ERROR = "error"
    UNKNOWN = "unknown"
    WAIVED = "waived"
    PASSED = "passed"
    NOT_VERIFIED = "not_verified"
    NOT_DECLARED = "not_declared"


_BY_WEIGHT = tuple(Outcome)
"""From the one that decides to the one that gives way."""


class Verdict(enum.StrEnum):
    """Of a whole run."""

    CONFORMANT = "conformant"
    PARTIAL = "partial"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """What a command that reaches this verdict exits with."""
        return {"conformant": 0, "failed": 1, "partial": 2, "inconclusive": 3}[self.value]


def combined(outcomes: Collection[Outcome]) -> Outcome:
    """The outcome of a rule: the weightiest of its checks'. NOT_VERIFIED where there is none."""
    return next((one for one in _BY_WEIGHT if one in outcomes), Outcome.NOT_VERIFIED)


@dataclass(eq=False)
class Violation(AssertionError):
    """The store breaks the rule that is being checked."""

    message: str
    """One sentence: what is wrong."""
    expected: str = ""
    got: str = ""
    sequence: Sequence[str] = field(default_factory=tuple)
    """The shortest sequence of calls that shows it, a line each."""

    def __str__(self) -> str:
        lines = [self.message]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.got:
            lines.append(f"came:     {self.got}")
        if self.sequence:
            lines.append("sequence:")
            lines.extend(f"  {line}" for line in self.sequence)
        return "\n".join(lines)


class NotDeclared(Exception):
    """The store does not claim what the check is about."""


class NotVerified(Exception):
    """The store claims it, and something that the check needs is not there: the message names it."""


class Unknown(Exception):
    """The check ran and could not decide."""
