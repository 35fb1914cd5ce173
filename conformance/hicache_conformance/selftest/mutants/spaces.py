"""Stores that take key spaces for one another, or ranks for different ones."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_conformance.selftest.references.dict_store import Stored
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


@caught_by("KV-101:a_page_is_not_seen_from_a_neighbour")
class ModelBlind(_Confused):
    """The model is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, model="any")


@caught_by(
    "KV-101:a_page_is_not_seen_from_a_neighbour",
    "KV-101:texts_may_be_odd",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class DtypeBlind(_Confused):
    """The dtype is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, dtype="any")


@caught_by("KV-101:each_neighbour_keeps_bytes_of_its_own", "KV-101:a_delete_spares_the_neighbours")
class PageSizeBlind(_Confused):
    """The size of a page is missing from its identity."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, page_nbytes=1)


@caught_by(
    "KV-101:a_page_is_not_seen_from_a_neighbour",
    "KV-101:fields_do_not_run_together",
    seen_in="an author's LMDB store",
)
class TenantBlind(_Confused):
    """The tenant is missing from the identity of a page."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant="")


# --- an identity that is less than its fields ------------------------------------------------------


@caught_by("KV-101:fields_do_not_run_together", "KV-106:ranks_of_a_sharded_pool_share_nothing")
class RangesSorted(_Confused):
    """The identity has the ranges of layers and heads, and not which is which."""

    def _seen(self, space: KeySpace) -> Hashable:
        ranges = sorted([space.shard.layers, space.shard.heads or (0, 0)])
        return _resharded(space, layers=(0, 1), heads=None), *ranges


@caught_by("KV-106:ranks_of_a_sharded_draft_share_nothing", seen_in="SGLang 0.5.23, file")
class RanklessBesideReplicated(_Confused):
    """No pool has a rank in its keys if the model's KV is the same on all ranks."""

    _replicated: set[str] = own(set)

    def _seen(self, space: KeySpace) -> Hashable:
        if space.pool == "kv" and space.shard.heads is None:
            self._replicated.add(space.model)
        rankless = space.pool != "kv" and space.model in self._replicated
        return _resharded(space, heads=None) if rankless else space


@caught_by("KV-101:texts_do_not_run_together")
class TextsJoined(_Confused):
    """The identity is the text fields joined by `-`, which occurs in them."""

    def _seen(self, space: KeySpace) -> Hashable:
        texts = (space.tenant, space.model, space.revision, space.dtype, space.layout, space.pool)
        return "-".join(texts), _numbers(space), space.shard


@caught_by("KV-101:texts_may_be_odd")
class TenantsFlattened(_Confused):
    """A slash in a tenant becomes a dash, as what a path may be made of."""

    def _seen(self, space: KeySpace) -> Hashable:
        return replace(space, tenant=space.tenant.replace("/", "-"))


@caught_by("KV-101:ids_that_are_alike_are_not_equal")
class IdsShortened(_Confused):
    """The first eight digits of the key space's id are the prefix of its keys."""

    def _seen(self, space: KeySpace) -> Hashable:
        return space.id[:8]


@caught_by(
    "KV-101:another_handle_keeps_neighbours_apart",
    "KV-106:ranks_with_handles_of_their_own_share_nothing",
)
class SpacesNumbered(Shelf):
    """Directories are numbered in the order in which a handle opens its key spaces."""

    _numbers: dict[KeySpace, int] = own(dict)

    def _folder(self, space: KeySpace) -> Path:
        return self._root / f"{self._numbers.setdefault(space, len(self._numbers)):032x}"


# --- pools of one hash ----------------------------------------------------------------------------


@caught_by("KV-102:pools_of_one_hash_coexist", "KV-102:what_is_done_to_the_draft_leaves_the_target")
class OneSizeAHash(DictStore):
    """A set of a page drops those of its hash that have another size."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        for other, one in list(self._pages.items()):
            if one.page_hash == stored.page_hash and len(one.data) != len(stored.data):
                self._drop(other)
        super()._put(key, stored)


@caught_by("KV-102:a_pool_without_the_page_has_a_miss")
class DraftFallsBack(DictStore):
    """A draft page that is not there is answered with the target's, which has the same size."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        found = super()._read(space, page_hash)
        if found is None and space.pool != "kv":
            return super()._read(replace(space, pool="kv"), page_hash)
        return found


# --- ranks ------------------------------------------------------------------------------------------


@caught_by(
    "KV-106:a_replicated_pool_is_one_for_all_handles",
    "KV-106:a_replicated_pool_is_one_for_all_processes",
)
class PagesOfAnInstance(Shelf):
    """Every instance keeps its pages under a name of its own, and shares them with none."""

    def __init__(self, settings: ShelfSettings) -> None:
        self._token = secrets.token_hex(8)
        super().__init__(settings)

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return super()._path(space, page_hash).with_name(f"{page_hash}-{self._token}")


@caught_by("KV-106:a_replicated_pool_is_one_for_equal_key_spaces")
class SpacesByObject(DictStore):
    """Key spaces are told apart as objects: equal ones, made by different ranks, are strangers."""

    _objects: list[KeySpace] = own(list)

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(space is known for known in self._objects):
            self._objects.append(space)
        return id(space), page_hash


class _Misnamed(DictStore):
    """A store that makes something else of a model's name."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return replace(space, model=f"/{self._name(space.model)}"), page_hash

    def _name(self, model: str) -> str:
        return model


@caught_by("KV-105:no_model_name_aliases_another", seen_in="SGLang 0.5.23, file")
class SlashesFlattened(_Misnamed):
    """`/` in a model's name becomes `-`: `a/b-c` and `a-b/c` are one."""

    def _name(self, model: str) -> str:
        return model.replace("/", "-")


@caught_by("KV-105:every_model_name_works", seen_in="SGLang 0.5.23, file")
class LongNamesFail(DictStore):
    """A name of more than 255 bytes is an OSError, as file systems have it."""

    def open_space(self, space: KeySpace) -> None:
        if len(space.model.encode()) > 255:
            raise OSError(36, "File name too long", space.model)
        super().open_space(space)


@caught_by(
    "KV-105:model_names_survive_reopening", "KV-105:a_model_name_leads_to_no_other_directory"
)
class NamesEscape(Shelf):
    """The directory of a key space is named by its model: `..` leads out of the store's own."""

    def _folder(self, space: KeySpace) -> Path:
        folder = self._root.joinpath(*(part[:60] for part in Path(space.model).parts), space.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
