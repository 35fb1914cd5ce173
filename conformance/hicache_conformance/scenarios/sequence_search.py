"""A search with Hypothesis for a sequence of calls after which a store and a dict disagree."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir, storage_directory
from hypothesis.reporting import with_reporter
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.scenarios.model_pair import PAGES, SPACES, ModelPair, Step
from hicache_conformance.tools.processes.machine import WorkLimit

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from hicache_conformance.case.case import Case

_STEPS = 30
_Where = tuple[int, int]
"""A handle and a key space, by their numbers."""
_WHERE = st.tuples(st.integers(0, 1), st.integers(0, len(SPACES) - 1))
_PAGE = st.integers(0, PAGES - 1)
_BATCH = st.lists(_PAGE, min_size=1, max_size=4, unique=True)


class SequenceSearch:
    """A search for a sequence of calls after which the store and the dict disagree.

    The search stops `limit_s` after the first sequence began, or later on a busy machine. Shortening
    the sequence that it found may take as long again.
    """

    def __init__(self, case: Case, limit_s: float) -> None:
        self.case = case
        self.sequences = 0
        self._limit_s = limit_s
        self._limit = WorkLimit(limit_s)
        self._found: tuple[Violation, list[Step]] | None = None
        self._undecided: NotVerified | None = None

    def run(self, sequences: int) -> None:
        """Try `sequences` sequences.

        Raises:
            Violation: A sequence leads to a disagreement. The message has the shortest one that was
                found.
            NotVerified: The store does not implement one of the calls.
        """

        @seed(self.case.random.getrandbits(64))
        def machine() -> _Machine:
            return _Machine(self)

        # The documentation allows any function that returns a machine.
        factory = cast("type[RuleBasedStateMachine]", machine)
        try:
            with _hypothesis_home(self.case.scratch.path / "hypothesis"), with_reporter(_mute):
                run_state_machine_as_test(factory, settings=_settings(sequences))
        except Exception:
            if self._undecided is not None:
                raise self._undecided from None
            if self._found is None:
                raise
        if self._found is not None:
            self._limit = WorkLimit(self._limit_s)
            raise self._shortened(*self._found)

    def new_pair(self) -> ModelPair | None:
        """Return a fresh pair, or None if the time is up or a sequence was found."""
        if not self.sequences:  # so that a busy machine has time for one sequence
            self._limit = WorkLimit(self._limit_s)
        if self._limit.is_over() or self._found is not None:
            return None
        self.sequences += 1
        return ModelPair(self.case, f"sequence{self.sequences}")

    def record(self, violation: Violation, steps: Sequence[Step]) -> None:
        """Record steps that ended in a disagreement."""
        self._found = violation, list(steps)

    def give_up(self, reason: NotVerified) -> None:
        """Record that the store does not implement a call, so that the search ends without a verdict."""
        self._undecided = reason

    def _shortened(self, violation: Violation, steps: list[Step]) -> Violation:
        """Leave out and reduce steps as long as the disagreement remains.

        Each try has a store of its own, so that other sequences have left nothing in it.
        """
        if self.sequences > 1 and self._replayed(steps) is None:
            others = f"({self.sequences - 1} other sequences of calls before, in the same store)"
            violation.sequence = [others, *violation.sequence]
            return violation
        before: list[Step] = []
        while steps != before:
            before = steps
            for place in reversed(range(len(steps))):
                for fewer in self._reductions(steps, place):
                    again = self._replayed(fewer)
                    if again is not None:
                        violation, steps = again, fewer
                        break
        return violation

    def _reductions(self, steps: Sequence[Step], place: int) -> Iterator[list[Step]]:
        """Yield the steps without the step at `place`, then with smaller steps in place of it."""
        before, step, after = steps[:place], steps[place], steps[place + 1 :]
        yield [*before, *after]
        for smaller in self._smaller(step):
            yield [*before, smaller, *after]

    def _smaller(self, step: Step) -> Iterator[Step]:
        if len(step.pages) > 1:
            for page in step.pages:
                yield replace(step, pages=tuple(one for one in step.pages if one != page))
        if step.kind == "agree":
            handles = range(2 if self.case.claims.shared else 1)
            for kind, handle, space in product(("exists", "get"), handles, range(len(SPACES))):
                yield Step(kind, handle, space, tuple(range(PAGES)))

    def _fresh_config(self) -> dict[str, Any]:
        """Return the config of an empty store, if each test's config names a store of its own."""
        case = self.case
        fresh = copy.copy(case.subject).config(case.new_scratch())
        return {**fresh, **case.changed_fields}

    def _replayed(self, steps: Sequence[Step]) -> Violation | None:
        if self._limit.is_over():
            return None
        self.sequences += 1
        pair = ModelPair(self.case, f"sequence{self.sequences}", self._fresh_config())
        try:
            for step in steps:
                pair.apply(step)
        except Violation as violation:
            return violation
        finally:
            pair.close()
        return None


class _Machine(RuleBasedStateMachine):
    """A state machine with a rule for each kind of step. Each sequence uses some rules, at random.

    Each sequence also has a random number of key spaces and pages. If there are few, calls hit the
    same pages more often.
    """

    def __init__(self, search: SequenceSearch) -> None:
        super().__init__()
        self._search = search
        self._pair = search.new_pair()
        self._checks_each_step = self._failed = False
        self._spaces = self._pages = 1

    @property
    def enumerable(self) -> bool:
        return self._search.case.claims.enumerable

    def has(self, operation: str) -> bool:
        return operation not in self._search.case.absent

    @property
    def outlives_handle(self) -> bool:
        return ModelPair.outlives_handle(self._search.case)

    @initialize(checks_each_step=st.booleans(), spaces=st.integers(1, len(SPACES)), pages=_PAGE)
    def begin(self, *, checks_each_step: bool, spaces: int, pages: int) -> None:
        self._checks_each_step, self._spaces, self._pages = checks_each_step, spaces, pages + 1

    @rule(where=_WHERE, pages=_BATCH)
    def set(self, where: _Where, pages: list[int]) -> None:
        self._do("set", where, pages)

    @rule(where=_WHERE, pages=_BATCH)
    def get(self, where: _Where, pages: list[int]) -> None:
        self._do("get", where, pages)

    @rule(where=_WHERE, pages=_BATCH)
    def exists(self, where: _Where, pages: list[int]) -> None:
        self._do("exists", where, pages)

    @precondition(lambda self: self.has("batch_delete"))
    @rule(where=_WHERE, pages=_BATCH)
    def delete(self, where: _Where, pages: list[int]) -> None:
        self._do("delete", where, pages)

    @rule(where=_WHERE)
    def open(self, where: _Where) -> None:
        self._do("open", where)

    @precondition(lambda self: self.enumerable and self.has("clear"))
    @rule(where=_WHERE)
    def clear(self, where: _Where) -> None:
        self._do("clear", where)

    @precondition(lambda self: self.enumerable and self.has("scan"))
    @rule(where=_WHERE)
    def scan(self, where: _Where) -> None:
        self._do("scan", where)

    @precondition(lambda self: self.outlives_handle)
    @rule(where=_WHERE)
    def reopen(self, where: _Where) -> None:
        self._do("reopen", where)

    @invariant()
    def agree(self) -> None:
        if self._checks_each_step:
            self._do("agree")

    def teardown(self) -> None:
        try:
            if not self._failed:
                self._do("agree")
        finally:
            if self._pair is not None:
                self._pair.close()

    def _do(self, kind: str, where: _Where = (0, 0), pages: Sequence[int] = ()) -> None:
        pair = self._pair
        if pair is None:  # The time was up before the sequence began.
            return
        handle, space = where
        few = dict.fromkeys(page % self._pages for page in pages)
        self._failed = True
        try:
            pair.apply(Step(kind, handle % pair.handles, space % self._spaces, tuple(few)))
        except Violation as violation:
            self._search.record(violation, pair.steps)
            raise
        except NotVerified as reason:
            self._search.give_up(reason)
            raise
        self._failed = False


def _settings(sequences: int) -> settings:
    return settings(
        database=None,
        deadline=None,
        derandomize=False,
        max_examples=sequences,
        phases=[Phase.generate],  # `_shortened` costs fewer calls of the store than Hypothesis's.
        print_blob=False,
        report_multiple_bugs=False,
        stateful_step_count=_STEPS,
        suppress_health_check=[
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
            HealthCheck.too_slow,
        ],
    )


@contextmanager
def _hypothesis_home(path: Path) -> Generator[None, None, None]:
    """Keep Hypothesis from writing into the working directory."""
    before = storage_directory(intent_to_write=False).home_directory
    set_hypothesis_home_dir(path)
    try:
        yield
    finally:
        set_hypothesis_home_dir(before)


def _mute(_: object) -> None:
    """Discard a report of Hypothesis, because the check reports the violation."""
