"""Answers of a call that only some parts of a store have answered, such as disks, servers or tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PartialAnswers(list[bool]):
    """The result of an exists or get call with pages that the store could not ask about.

    Such a page counts as False, because nobody can use it, but it may be there. So the page store says
    neither in events nor in reasons that it is gone.
    """

    def __init__(self, known: Sequence[bool | None]) -> None:
        """Take the answers. None: there is none."""
        super().__init__([answer is True for answer in known])
        self.unanswered: frozenset[int] = frozenset(
            position for position, answer in enumerate(known) if answer is None
        )
        """The positions of the pages without an answer."""


def answers_of(known: Sequence[bool | None]) -> list[bool]:
    """Return answers as the result of an exists or get call. None: the store gave none for this page.

    Examples:
        >>> answers_of([True, None])
        [True, False]
        >>> unanswered_in(answers_of([True, None]))
        frozenset({1})
    """
    return PartialAnswers(known) if None in known else [answer is True for answer in known]


def unanswered_in(answers: Sequence[bool]) -> frozenset[int]:
    """Return the positions of the pages that a store could not ask about."""
    return answers.unanswered if isinstance(answers, PartialAnswers) else frozenset()
