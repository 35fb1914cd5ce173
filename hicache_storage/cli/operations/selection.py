"""Select the key spaces of a store that a verb works on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.escapes import escaped
from hicache_storage.composition.parts import all_parts
from hicache_storage.errors import ConfigError, did_you_mean, shown
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.keys import KeySpace, Shard
    from hicache_storage.storage import HiCacheStorage, UnreadableSpace

SHORT_ID_DIGITS = 8
_LEAST_DIGITS = 4
_HASH_DIGITS = 64
_HEX = re.compile("[0-9a-f]+")
_MOST_CHOICES = 8


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """A key space and its pages. None: the pages were not counted."""

    space: KeySpace
    pages: int | None
    nbytes: int | None
    tiers: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The pages and bytes in each part of a composed store, by its name."""

    def as_json(self) -> dict[str, Any]:
        """Return the manifest, the id and the figures, ready for JSON."""
        tiers = {
            name: {"pages": pages, "nbytes": nbytes} for name, (pages, nbytes) in self.tiers.items()
        }
        return {
            "id": self.space.id,
            **self.space.manifest(),
            "pages": self.pages,
            "nbytes": self.nbytes,
            **({"tiers": tiers} if tiers else {}),
        }


@dataclass(frozen=True, slots=True)
class Selected:
    """The key spaces that a selection found in a store."""

    spaces: list[KeySpace]
    """Sorted by model and pool."""
    unreadable: list[UnreadableSpace]
    """Key spaces that the store cannot identify. `ids` select among them, but fields do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSelection:
    """A choice of key spaces by id and by fields. Without `ids`, every id matches. None: any value."""

    ids: Sequence[str] = ()
    """The first digits of ids. Each must match exactly one key space."""
    model: str | None = None
    revision: str | None = None
    tenant: str | None = None
    pool: str | None = None

    def of(self, storage: HiCacheStorage) -> Selected:
        """Return the selected key spaces of a store. `among` says what it raises."""
        return self.among(storage.spaces(), storage.unreadable_spaces())

    def among(
        self, spaces: Iterable[KeySpace], unreadable_spaces: Iterable[UnreadableSpace]
    ) -> Selected:
        """Return the selected ones of some key spaces. There may be none.

        Raises:
            ConfigError: An id matches no key space, or several. Or the store lists its key spaces,
                but none of them has these fields.
        """
        known = sorted(
            spaces,
            key=lambda one: (one.model, one.revision, one.tenant, one.pool, one.id),
        )
        unreadable = [*unreadable_spaces]
        if self.ids:
            ids = [*(one.id for one in known), *(one.space_id for one in unreadable)]
            all_ids = dict.fromkeys(ids)  # parts of a composition may all fail to read one
            where = "`hicache ls` lists their ids"
            chosen = {_only_one("key space", all_ids, text.lower(), where) for text in self.ids}
            known = [one for one in known if one.id in chosen]
            unreadable = [one for one in unreadable if one.space_id in chosen]
        return Selected(self._with_fields(known), unreadable)

    def _with_fields(self, spaces: list[KeySpace]) -> list[KeySpace]:
        asked: list[str] = []
        for name in ("model", "revision", "tenant", "pool"):
            wanted: str | None = getattr(self, name)
            if wanted is None:
                continue
            asked.append(f"{name} {wanted!r}")
            found = [one for one in spaces if getattr(one, name) == wanted]
            if not found:
                names = sorted({escaped(getattr(one, name)) for one in spaces} - {""})
                hint = did_you_mean(wanted, names)
                if "?" not in hint and len(names) > _MOST_CHOICES:
                    hint = ": `hicache ls` lists them"
                raise ConfigError(f"the store has no key space of {', '.join(asked)}{hint}")
            spaces = found
        return spaces


def find_space(storage: HiCacheStorage, text: str) -> KeySpace:
    """Return the key space whose id begins with `text`.

    Raises:
        ConfigError: No key space matches, or several do, or the store cannot identify it, or the text
            has too few digits.
    """
    selected = SpaceSelection(ids=[text]).of(storage)
    for one in selected.unreadable if not selected.spaces else ():
        raise ConfigError(f"key space {one.space_id} cannot be read: {one.reason}")
    return selected.spaces[0]


def find_page(storage: HiCacheStorage, space: KeySpace, text: str) -> str:
    """Return the page hash in `space` that begins with `text`, or `text` itself if it is a whole hash.

    Raises:
        ConfigError: No page matches, or several do, or the text is not the beginning of a hash.
    """
    text = text.lower()
    try:
        check_page_hashes([text])
        is_whole = len(text) == _HASH_DIGITS or storage.batch_exists(space, [text]) == [True]
    except ValueError:
        if not _HEX.fullmatch(text):
            raise ConfigError(
                f"HASH: a page hash is 16 to 64 bytes in lowercase hex, not {shown(text)!r}"
            ) from None
        is_whole = False
    if is_whole:
        return text
    listed = chain(
        (info.page_hash for info in storage.scan(space)),
        (fault.page_hash for fault in storage.faults(space)),
    )
    where = f"`hicache ls {space.id[:SHORT_ID_DIGITS]}` lists them"
    return _only_one("page", listed, text, where)


def find_pages(storage: HiCacheStorage, space: KeySpace, texts: Sequence[str]) -> list[str]:
    """Return the hashes of the pages, right or damaged, that begin with each of `texts`, once each.

    Raises:
        ConfigError: One of them is not in the store, or as in `find_page`.
    """
    hashes = [*dict.fromkeys(find_page(storage, space, text) for text in texts)]
    there = storage.batch_exists(space, hashes)
    missing = [one for one, is_there in zip(hashes, there, strict=True) if not is_there]
    faults = storage.faults(space, missing) if missing else ()
    damaged = {fault.page_hash for fault in faults}
    for page_hash in missing:
        if page_hash in damaged:
            continue
        parts = all_parts(storage)
        holders = [name for name, one in parts.items() if one.batch_exists(space, [page_hash])[0]]
        if holders:
            raise ConfigError(
                f"page {page_hash} is only in {', '.join(holders)}, where engines do not look for it:"
                " name that place with --tier"
            )
        where = f"`hicache ls {space.id[:SHORT_ID_DIGITS]}` lists them"
        _only_one("page", (), page_hash, where)
    return hashes


def _only_one(kind: str, names: Iterable[str], text: str, where: str) -> str:
    """Return the only name that begins with `text`."""
    if len(text) < _LEAST_DIGITS:
        raise ConfigError(f"{kind} {shown(text)!r}: give at least {_LEAST_DIGITS} digits of it")
    found = [*islice((name for name in names if name.startswith(text)), _MOST_CHOICES)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"the store has no {kind} {shown(text)!r}: {where}")
    digits = len(text) + SHORT_ID_DIGITS
    several = ", ".join(name[:digits] for name in found)
    raise ConfigError(f"several {kind}s begin with {text!r}: {several}; give more digits")


def format_shard(shard: Shard) -> str:
    """Format the layers, heads and context of a shard: `L0-32 H0-8`."""
    parts = [f"L{shard.layers[0]}-{shard.layers[1]}"]
    if shard.heads is not None:
        parts.append(f"H{shard.heads[0]}-{shard.heads[1]}")
    if shard.context is not None:
        parts.append(f"C{shard.context[0]}/{shard.context[1]}")
    return " ".join(parts)
