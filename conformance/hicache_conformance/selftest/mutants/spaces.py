"""Stores that take key spaces for one another, or ranks for different ones."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from hicache_conformance.selftest.references.dict_store import DictSettings, Stored
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace


class _Confused(DictStore):
    """A store that keeps pages by something that is less than the key space."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return self._seen(space), page_hash

    def _seen(self, space: KeySpace) -> Hashable:
        return space.id


def _numbers(space: KeySpace) -> tuple[int, ...]:
    return space.page_tokens, space.page_nbytes, space.frame_nbytes


def _resharded(space: KeySpace, **fields: Any) -> KeySpace:
    return replace(space, shard=replace(space.shard, **fields))


# --- a field that is missing from the identity ----------------------------------------------------


@caught_by("KV-101")
class ModelBlind(_Confused):
    """The model is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, model="any")


@caught_by("KV-101")
class DtypeBlind(_Confused):
    """The dtype is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, dtype="any")


@caught_by("KV-101")
class LayoutBlind(_Confused):
    """The layout is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, layout="any")


@caught_by("KV-101")
class PageTokensBlind(_Confused):
    """The number of tokens in a page is missing from its identity."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, page_tokens=1)


@caught_by("KV-101")
class PageSizeBlind(_Confused):
    """The size of a page is missing from its identity."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, page_nbytes=1)


@caught_by("KV-101")
class FrameBlind(_Confused):
    """The size of the frame is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, frame_nbytes=0)


@caught_by("KV-101", "KV-102")
class PoolBlind(_Confused):
    """The pool is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, pool="any", page_nbytes=1)


@caught_by("KV-101")
class RevisionBlind(_Confused):
    """The revision of the weights is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, revision="")


@caught_by("KV-101")
class TenantBlind(_Confused):
    """The tenant is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant="")


@caught_by("KV-101", "KV-106")
class LayersBlind(_Confused):
    """The layers are missing from the identity: pipeline ranks read each other's."""

    def _seen(self, space: KeySpace) -> Hashable:
        return _resharded(space, layers=(0, 1))


@caught_by("KV-101", "KV-106")
class HeadsBlind(_Confused):
    """The heads are missing from the identity: tensor-parallel ranks read each other's."""

    def _seen(self, space: KeySpace) -> Hashable:
        return _resharded(space, heads=None)


@caught_by("KV-101", "KV-106")
class ContextBlind(_Confused):
    """The rank in context parallelism is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return _resharded(space, context=None)


# --- an identity that is less than its fields ------------------------------------------------------


@caught_by("KV-101", "KV-106")
class HeadsCounted(_Confused):
    """The identity has the number of heads of a rank, and not which they are."""

    def _seen(self, space: KeySpace) -> Hashable:
        first, last = space.shard.heads or (0, 1)
        return _resharded(space, heads=(0, last - first))


@caught_by("KV-101", "KV-106")
class RangesSorted(_Confused):
    """The identity has the ranges of layers and heads, and not which is which."""

    def _seen(self, space: KeySpace) -> Hashable:
        ranges = sorted([space.shard.layers, space.shard.heads or (0, 0)])
        return _resharded(space, layers=(0, 1), heads=None), *ranges


@caught_by("KV-101")
class HeadsNoneIsAll(_Confused):
    """A pool without heads is taken for one with all eight of them."""

    def _seen(self, space: KeySpace) -> Hashable:
        return _resharded(space, heads=space.shard.heads or (0, 8))


@caught_by("KV-106", check="ranks_of_a_sharded_draft_share_nothing")
class RanklessBesideReplicated(_Confused):
    """Where a model's KV is the same on all ranks, no pool of it has a rank in its keys (SGLang)."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._replicated: set[str] = set()

    def _seen(self, space: KeySpace) -> Hashable:
        if space.pool == "kv" and space.shard.heads is None:
            self._replicated.add(space.model)
        rankless = space.pool != "kv" and space.model in self._replicated
        return _resharded(space, heads=None) if rankless else space


@caught_by("KV-106")
class ContextOfHeadsOnly(_Confused):
    """Without heads, the rank in context parallelism is taken to be of no importance."""

    def _seen(self, space: KeySpace) -> Hashable:
        return _resharded(space, context=space.shard.heads and space.shard.context)


@caught_by("KV-101")
class TextsJoined(_Confused):
    """The identity is the text fields joined by `-`, which occurs in them."""

    def _seen(self, space: KeySpace) -> Hashable:
        texts = (space.tenant, space.model, space.revision, space.dtype, space.layout, space.pool)
        return "-".join(texts), _numbers(space), space.shard


@caught_by("KV-101")
class TenantsFlattened(_Confused):
    """A slash in a tenant becomes a dash, as what a path may be made of."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant=space.tenant.replace("/", "-"))


@caught_by("KV-101")
class PoolsFolded(_Confused):
    """Pools are named in small letters."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, pool=space.pool.lower())


@caught_by("KV-101")
class SizesSummed(_Confused):
    """The identity has the bytes that are stored, and not how many of them are the frame."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, page_nbytes=space.stored_nbytes, frame_nbytes=0)


@caught_by("KV-101")
class IdsShortened(_Confused):
    """The first eight digits of the key space's id are the prefix of its keys."""

    def _seen(self, space: KeySpace) -> Hashable:
        return space.id[:8]


@caught_by("KV-101")
class LastOpenedOnly(_Confused):
    """Every call goes to the key space that was opened last, whatever it names."""

    _current: KeySpace | None = None

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._current = space

    def _seen(self, space: KeySpace) -> Hashable:
        return (self._current or space).id


@caught_by("KV-101")
class ExistsAnywhere(DictStore):
    """One index of hashes for all key spaces: a page that another has exists."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            hashes = {stored.page_hash for stored in self._pages.values()}
        return page_hash in hashes or super()._has(space, page_hash)


@caught_by("KV-101")
class DeletesEverywhere(DictStore):
    """Deleting a page removes those of its hash in every key space."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            for key in [key for key, one in self._pages.items() if one.page_hash == page_hash]:
                self._drop(key)
        return super()._removed(space, page_hash)


@caught_by("KV-101")
class SpacesNumbered(Shelf):
    """Directories are numbered in the order in which a process opens its key spaces."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._numbers: dict[KeySpace, int] = {}
        super().__init__(settings)

    def _folder(self, space: KeySpace) -> Path:
        return self._root / f"{self._numbers.setdefault(space, len(self._numbers)):032x}"


# --- pools of one hash ----------------------------------------------------------------------------


@caught_by("KV-102")
class OneSizeAHash(DictStore):
    """A set of a page drops those of its hash that have another size."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        for other, one in list(self._pages.items()):
            if one.page_hash == stored.page_hash and len(one.data) != len(stored.data):
                self._drop(other)
        super()._put(key, stored)


@caught_by("KV-102")
class DraftFallsBack(DictStore):
    """A draft page that is not there is answered with the target's, which has the same size."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        found = super()._read(space, page_hash)
        if found is None and space.pool != "kv":
            return super()._read(replace(space, pool="kv"), page_hash)
        return found


@caught_by("KV-102")
class DraftTakesTheTarget(DictStore):
    """Deleting a draft page deletes the target's page of that hash with it."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            for key, one in list(self._pages.items()):
                if one.page_hash == page_hash and one.space.model == space.model:
                    self._drop(key)
        return True


# --- ranks ------------------------------------------------------------------------------------------


@caught_by("KV-106")
class PagesOfAnInstance(Shelf):
    """Every instance keeps its pages under a name of its own, and shares them with none."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._token = secrets.token_hex(8)
        super().__init__(settings)

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return super()._path(space, page_hash).with_name(f"{page_hash}-{self._token}")


@caught_by("KV-106")
class PagesOfAProcess(Shelf):
    """The process id is part of a page's name: replicated pools are stored once a rank."""

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return super()._path(space, page_hash).with_name(f"{page_hash}-{os.getpid()}")


@caught_by("KV-106")
class PagesOfARank(Shelf):
    """The launcher's rank is part of a page's name, whether or not the pool is sharded."""

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        rank = os.environ.get("RANK", "0")
        return super()._path(space, page_hash).with_name(f"{page_hash}-{rank}")


@caught_by("KV-106")
class SpacesByObject(DictStore):
    """Key spaces are told apart as objects: equal ones, made by different ranks, are strangers."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._objects: list[KeySpace] = []

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(space is known for known in self._objects):
            self._objects.append(space)
        return id(space), page_hash


@caught_by("KV-106")
class ReplicatedOnce(Shelf):
    """Of a replicated pool only the handle that first wrote to it may write."""

    _is_writer = False

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if space.shard.heads is None and not self._is_writer:
            self._is_writer = not self._names(space)
            if not self._is_writer:
                return [True] * len(hashes)
        return super()._store(space, hashes, contents)
