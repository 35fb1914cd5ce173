"""Name the stores of a composition in themselves, so that it knows them under another path or name.

A label is a key space without pages, so that any store that lists its key spaces can have one, and none
evicts it. Its fields are the id of the composition and the name of the store. A store also has a label
for each other one, so it is known which store is missing, and which one is new.
"""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, TypeAlias

from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.composition.unopened import as_unavailable
from hicache_storage.errors import HiCacheError, StorageUnavailable
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hicache_storage.errors import StorageTimeout
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.composition")

LABEL = "label"
"""The topic of the diagnosis of a store that has another label than its name, behind its name."""
_MODEL = "hicache-label"
_OWN, _OTHER = "own", "other"
_Found: TypeAlias = "dict[str, set[tuple[str, str]]]"


def is_label(space: KeySpace) -> bool:
    """Return True for a key space that is a label."""
    return space.model == _MODEL


class Labels:
    """What the labels in the stores of one composition say."""

    def __init__(self, parts: Sequence[str]) -> None:
        """Begin with the names in the config, in order."""
        self.names: dict[str, str] = {part: part for part in parts}
        """The name by which pages are placed in each store, by its name in the config."""
        self.facts: dict[str, str] = {}
        """What is unusual about the label of a store, by its name in the config."""
        self._composition = uuid.uuid4().hex
        self._found: dict[str, _Found] = {}
        self._own: dict[str, str] = {}
        self._known = set[str]()

    def read(
        self, stores: Mapping[str, HiCacheStorage]
    ) -> dict[str, StorageUnavailable | StorageTimeout]:
        """Read the labels of open stores. Return why some of them must not be used."""
        refused: dict[str, StorageUnavailable | StorageTimeout] = {}
        for part, store in stores.items():
            try:
                self._found[part] = _labels_in(store)
            except HiCacheError as error:  # it may be any of them
                refused[part] = as_unavailable(error)
        labels = {part: found[_OWN] for part, found in self._found.items()}
        votes = [
            (sum((one, part) in own for part, own in labels.items()), one)
            for one in {one for own in labels.values() for one, _ in own}
        ]
        if votes:  # the composition that most stores are of under their names
            counts = {one: sum(one in dict(own) for own in labels.values()) for _, one in votes}
            self._composition = max(votes, key=lambda vote: (vote[0], counts[vote[1]], vote[1]))[1]
        for part, own in labels.items():
            ours = sorted(name for one, name in own if one == self._composition)
            others = sorted(name for one, name in own if one != self._composition)
            if ours:
                self._own[part] = part if part in ours else ours[0]
            elif others and part not in others:
                refused[part] = StorageUnavailable(
                    f"there is the store {others[0]!r} of another composition",
                    advice=f"mount the right one, or call it {others[0]!r} in the config to use it",
                )
        for part, found in self._found.items():
            if part not in refused:
                self._known |= {name for one, name in found[_OTHER] if one == self._composition}
        self._known |= {*self._own.values()}
        self._assign()
        return refused

    def is_unmounted(self, part: str) -> bool:
        """Return True if the composition has had the store that `part` has to be."""
        return self.names[part] in self._known

    def check(self, part: str, store: HiCacheStorage) -> None:
        """Read the labels of a store that opened after the others.

        Raises:
            StorageUnavailable: It is another one than this process places pages for.
            HiCacheError: Its labels cannot be read.
        """
        self._found[part] = _labels_in(store)
        found = sorted(name for _, name in self._found[part][_OWN])
        name = self.names[part]
        if found and name not in found:
            raise StorageUnavailable(
                f"there is the store {found[0]!r} instead of {name!r}",
                advice="mount the right one, or restart the engine, which uses it as what it is",
            )

    def write(self, stores: Mapping[str, HiCacheStorage]) -> None:
        """Label stores whose labels were read, where a label is missing: their own, and the others'."""
        self._known |= {self.names[part] for part in stores}
        for part, store in stores.items():
            own = self._own.get(part, self.names[part])
            _write(store, self._found[part], self._composition, own, self._known - {own})

    def _assign(self) -> None:
        names: dict[str, str] = {}
        for part in sorted(self.names, key=lambda one: self._own.get(one) != one):
            label = self._own.get(part)
            if label is not None and label not in names.values():
                names[part] = label
            elif label is not None:
                self.facts[part] = f"there is a copy of the store {label!r}"
        for part in self.names:
            if part not in names and part not in names.values():
                names[part] = part
        for part in self.names:
            if part not in names:
                names[part] = next(one for one in self.names if one not in names.values())
            elif names[part] != part:
                self.facts[part] = f"there is the store {names[part]!r}"
        self.names = {part: names[part] for part in self.names}


class UnlabelledStorage(WrapperStorage):
    """A store of a composition as others see it: without its labels."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self.inner.batch_get(space, hashes, pages)

    def spaces(self) -> Iterator[KeySpace]:
        return (space for space in self.inner.spaces() if not is_label(space))


def _labels_in(store: HiCacheStorage) -> _Found:
    """Return the composition and name in each label of a store, by kind."""
    found: _Found = {_OWN: set(), _OTHER: set()}
    for space in store.spaces() if _can_be_labelled(store) else ():
        if is_label(space) and space.pool in found:
            found[space.pool].add((space.tenant, space.revision))
    return found


def _write(
    store: HiCacheStorage, there: _Found, composition: str, own: str, others: Collection[str]
) -> None:
    if not _can_be_labelled(store):
        return
    for kind, name in ((_OWN, own), *((_OTHER, one) for one in sorted(others))):
        if (composition, name) in there[kind]:
            continue
        try:
            store.open_space(
                KeySpace(
                    model=_MODEL,
                    revision=name,
                    tenant=composition,
                    pool=kind,
                    dtype="uint8",
                    layout="page_first",
                    page_tokens=1,
                    page_nbytes=1,
                    shard=Shard(layers=(0, 1)),
                )
            )
        except HiCacheError as error:
            logger.warning("store %r could not be labelled: %s", own, error)
            return


def _can_be_labelled(store: HiCacheStorage) -> bool:
    """Return False for a store that forgets its key spaces, or does not list them."""
    return store.capabilities.shared and store.capabilities.enumerable
