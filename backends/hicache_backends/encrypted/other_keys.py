"""Find sealed key spaces in the backend that the name key does not open, and explain why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.encrypted.layout import is_sealed
from hicache_storage.storage import Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicache_backends.encrypted.layout import Names
    from hicache_storage.keys import KeySpace


class OtherKeys:
    """The backend's sealed key spaces that the name key does not open, and the reasons why."""

    def __init__(self, names: Mapping[str, Names], name_key: str) -> None:
        self._names = names
        self._name_key = name_key

    def sealed(self, spaces: Iterable[KeySpace]) -> list[KeySpace]:
        """Return the backend's key spaces that were sealed with other keys."""
        own = self._names[self._name_key]
        return [each for each in spaces if is_sealed(each) and own.opened_space(each) is None]

    def reason(self, inner: KeySpace, page_key: str | None) -> str:
        """Explain why the name of `inner` does not open.

        `page_key` is the id of the key that sealed one of its pages, if known.
        """
        for key_id, names in self._names.items():
            if names.opened_space(inner) is not None:
                return f"the key {key_id!r} opens its name, but name_key is {self._name_key!r}"
        known = "" if page_key is None else f"; it has pages of the key {page_key!r}"
        return f"none of the keys opens its name{known}"

    def diagnoses(self, spaces: Iterable[KeySpace]) -> Iterator[Diagnosis]:
        """Report how many key spaces of the backend this storage cannot open, and why."""
        spaces = list(spaces)
        others = len(self.sealed(spaces))
        if others:
            yield Diagnosis(
                "other keys",
                f"sealed key spaces that the name key {self._name_key!r} does not open: {others}",
                "if they are yours, correct name_key or the file of the key; until then all"
                " their pages are misses",
            )
        plain = sum(not is_sealed(each) for each in spaces)
        if plain:
            fact = f"key spaces of others, whose pages are not sealed: {plain}"
            yield Diagnosis("not sealed", fact)
