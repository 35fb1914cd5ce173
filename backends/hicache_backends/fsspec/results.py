"""From what came of each page to the verdicts of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_backends.fsspec.errors import (
    failure,
    says_down,
    says_full,
    says_late,
    says_missing,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.fsspec.executors import Answer
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.errors import HiCacheError


class ResultMapper:
    """Counts failures, and raises where a store has not answered."""

    def __init__(self, counters: Counters, shown_url: str, timeout_s: float) -> None:
        self._counters = counters
        self._shown_url = shown_url
        self._timeout_s = timeout_s

    def found(self, answers: Sequence[Answer[bool]]) -> list[bool]:
        """Of an exists: a failure is a counted miss.

        Raises:
            StorageTimeout, StorageUnavailable: No page was answered.
        """
        self.must_have_answered(answers)
        return [answer.value is True for answer in answers]

    def removed(self, answers: Sequence[Answer[None]]) -> list[bool]:
        """Of a delete: what was not there is gone.

        Raises:
            StorageTimeout, StorageUnavailable: No page was answered.
        """
        self.must_have_answered(answers)
        return [answer.error is None or says_missing(answer.error) for answer in answers]

    def stored(self, answers: Sequence[Answer[None]]) -> list[bool]:
        """Of a set: False is for pages that surely will not show.

        Raises:
            StorageTimeout, StorageUnavailable: A page failed, and may be there or may not.
        """
        errors = [answer.error for answer in answers if answer.error is not None]
        failed = self._counted([error for error in errors if not says_full(error)])
        if failed:
            raise self.failure(failed)
        verdicts = [answer.error is None for answer in answers]
        self._counters.add("refused_no_space", verdicts.count(False))
        return verdicts

    def must_have_answered(self, answers: Sequence[Answer[Any]]) -> None:
        """Raise unless one page was answered, or there are none."""
        errors = [answer.error for answer in answers if answer.error is not None]
        failed = self._counted([error for error in errors if says_down(error)])
        if failed and len(failed) == len(answers):
            raise self.failure(failed)

    def must_all_have_answered(self, answers: Sequence[Answer[Any]]) -> None:
        """Raise where one was not answered: what is not known is not left out."""
        failed = self._counted([one.error for one in answers if one.error is not None])
        if failed:
            raise self.failure(failed)

    def failure(self, errors: Sequence[Exception]) -> HiCacheError:
        """Return what to raise for errors of the store.

        It is raised without its cause: the text of fifty libraries may hold tokens and signed URLs.
        """
        return failure(errors, self._shown_url, self._timeout_s)

    def _counted(self, failed: list[Exception]) -> list[Exception]:
        late = sum(map(says_late, failed))
        self._counters.add("timeouts", late)
        self._counters.add("io_errors", len(failed) - late)
        return failed
