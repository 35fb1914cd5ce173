"""Wrong stores: verdicts of another length, order or type; KV-201."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


def _as_verdicts(answer: object) -> list[bool]:
    """What a wrong store returns in place of a list of bool."""
    return cast("list[bool]", answer)


@caught_by("KV-201")
class VerdictsOfNumpy(DictStore):
    """Verdicts are numpy.bool_, which `is True` and JSON do not know."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts(list(np.array(verdicts, dtype=bool)))


@caught_by("KV-201")
class VerdictsAsNumbers(DictStore):
    """Verdicts are 1 and 0, as a server replies."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts([int(verdict) for verdict in verdicts])


@caught_by("KV-201")
class VerdictsInAnArray(DictStore):
    """Verdicts are an array of numpy."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts(np.array(verdicts, dtype=bool))


@caught_by("KV-201")
class VerdictsInATuple(DictStore):
    """Verdicts are a tuple."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts(tuple(verdicts))


@caught_by("KV-201")
class VerdictsToCome(DictStore):
    """Verdicts are a generator."""

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        return _as_verdicts(verdict for verdict in verdicts)


@caught_by("KV-201")
class DeleteTellsNothing(DictStore):
    """A delete returns None."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        super().batch_delete(space, hashes)
        return _as_verdicts(None)


@caught_by("KV-201")
class MissIsNone(DictStore):
    """Get's verdict about a missing page is None."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        return cast("bool", None if data is None else super()._filled(page, data))


@caught_by("KV-201")
class EndsAtTheFirstMiss(DictStore):
    """The verdicts of exists end at the first miss, as a prefix cache needs no more."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = super()._present(space, hashes)
        return found[: found.index(False) + 1] if False in found else found


@caught_by("KV-201")
class CountsThePrefix(DictStore):
    """Exists returns how many pages there are from the first one on (as an engine's own interface)."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        found = [*super().batch_exists(space, hashes), False]
        return _as_verdicts(found.index(False))


@caught_by("KV-201")
class AnswersInItsOwnOrder(DictStore):
    """The verdicts of exists are in the order of the sorted hashes."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return super()._present(space, sorted(hashes))


@caught_by("KV-201")
class SortsTheHashes(DictStore):
    """The list of hashes is sorted in place, so as to read in the order of the disk."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        verdicts = super().batch_exists(space, list(hashes))
        if isinstance(hashes, list):
            hashes.sort()
        return verdicts


@caught_by("KV-201")
class UsesUpThePages(DictStore):
    """A set takes the pages out of the list that it was given."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, list(pages))
        if isinstance(pages, list):
            pages.clear()
        return verdicts


@caught_by("KV-201")
class NeedsLists(DictStore):
    """The hashes are copied as only a list can be: a tuple is an AttributeError."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        names = cast("list[str]", hashes).copy()
        return super()._present(space, names)


@caught_by("KV-201")
class NothingToDo(DictStore):
    """An empty batch is an error of the store's own making (as a pipeline without commands is)."""

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if not hashes:
            raise ValueError("wrong number of arguments for 'del'")
        return super()._remove(space, hashes)


@caught_by("KV-201")
class NothingIsFalse(DictStore):
    """An empty batch of exists gives one verdict: False."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return super()._present(space, hashes) or [False]


@caught_by("KV-201")
class SharesItsAnswers(DictStore):
    """Exists keeps the lists that it returned, and returns them again."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._answers: dict[tuple[object, ...], list[bool]] = {}

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        fresh = super().batch_exists(space, hashes)
        with self._lock:
            question = (space, len(self._pages), tuple(hashes))
        return self._answers.setdefault(question, fresh)
