"""The outcomes of a check, a rule and a run, and the exceptions with which a check reports them.

A check returns if its fact holds. Otherwise it raises one of these:

    Violation      the store breaks the rule                            -> failed
    NotDeclared    the store does not claim what the rule is about      -> not_declared
    NotVerified    the claim is made, the means to test it are missing  -> not_verified
    Unknown        the test ran and could not decide                    -> unknown

Any other exception is a mistake of the kit or of its surroundings: `error`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Outcome(enum.StrEnum):
    """The outcome of one check, or of all checks of a rule."""

    FAILED = "failed"
    ERROR = "error"
    UNKNOWN = "unknown"
    WAIVED = "waived"
    PARTLY = "partly"
    """For a rule only: what was tested holds, but some of its checks did not run, or could not."""
    PASSED = "passed"
    NOT_VERIFIED = "not_verified"
    NOT_DECLARED = "not_declared"


_BY_WEIGHT = tuple(Outcome)
"""The outcomes, beginning with the one that outweighs all others."""


class Verdict(enum.StrEnum):
    """The verdict of a whole run."""

    CONFORMANT = "conformant"
    INCOMPLETE = "incomplete"
    """Nothing that ran failed, but some of the checks did not run."""
    PARTIAL = "partial"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """The exit code of a command that reaches this verdict."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Verdict.CONFORMANT: 0,
    Verdict.INCOMPLETE: 0,
    Verdict.FAILED: 1,
    Verdict.PARTIAL: 2,
    Verdict.INCONCLUSIVE: 3,
}


def combined(outcomes: Collection[Outcome], *, is_whole: bool = True) -> Outcome:
    """Return the outcome of a rule: the weightiest outcome of its checks, NOT_VERIFIED if it has none.

    A rule has passed only if each of its checks ran (`is_whole`), and none lacked what it needs.
    """
    found = next((one for one in _BY_WEIGHT if one in outcomes), Outcome.NOT_VERIFIED)
    if found is Outcome.PASSED and not (is_whole and Outcome.NOT_VERIFIED not in outcomes):
        return Outcome.PARTLY
    return found


@dataclass(eq=False)
class Violation(AssertionError):
    """The store breaks the rule that is being checked."""

    message: str
    """The defect, in one sentence."""
    expected: str = ""
    got: str = ""
    sequence: Sequence[str] = field(default_factory=tuple)
    """The shortest sequence of calls that shows the violation, a line for each call."""

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
    """The store makes the claim, but the kit lacks something to test it. The message says what."""


class Unknown(Exception):
    """The check ran and could not decide."""
