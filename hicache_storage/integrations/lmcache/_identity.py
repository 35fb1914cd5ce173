"""Key spaces of LMCache's objects, made of every property that the bytes of an object depend on.

    property                          source                              field
    model                             key: the engine's `--model`         model
    weights, LoRA, RoPE, ...          adapter_params: `revision`          revision
    LMCache's release, platform       LMCache, torch (_settings.py)       revision
    KV type                           layout, or `kv_dtype`               dtype
    shapes of all parts, serde        object, or hint of the lookup       layout
    rank and number of ranks          key: `kv_rank`                      layout, shard
    server of a larger engine         adapter_params: `server`            layout
    object group                      key                                 pool
    tokens of a chunk                 layout (and the chunk's hash)       page_tokens
    tenant, the request's salt        adapter_params: `tenant`, key       tenant

`kv_rank` counts the ranks of one LMCache server. If an engine spans several servers, ranks on different
servers can have the same key, and only `server` tells these ranks apart. LMCache's keys do not name LoRA
adapters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_storage.integrations.lmcache._engine import KeyFields
from hicache_storage.integrations.lmcache._object_layouts import UnknownLayoutError
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from hicache_storage.integrations.lmcache._engine import ObjectKey
    from hicache_storage.integrations.lmcache._object_layouts import Layout

_FORMAT = "lmcache-1"
_GROUP = "object_group_"
_MIN_HASH_NBYTES = 16
_MAX_HASH_NBYTES = 64
_MAX_SPACES = 4096
_LAYOUT = re.compile(
    rf"{_FORMAT};[^;]*(;serde=(?P<serde>[^;]*))?"
    r";rank=(?P<kv_rank>0x[0-9a-f]{8})(;server=(?P<server>.*))?"
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one adapter's objects, which makes their key spaces. Thread-safe."""

    revision: str
    tenant: str
    server: str
    _spaces: dict[tuple[str, int, int, str, Layout], KeySpace] = field(
        default_factory=dict[tuple[str, int, int, str, "Layout"], KeySpace], init=False
    )

    def space(self, key: ObjectKey, layout: Layout) -> KeySpace:
        """Return the key space of a key whose object has `layout`."""
        facts = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout)
        space = self._spaces.get(facts)
        if space is None:
            if len(self._spaces) >= _MAX_SPACES:  # a limit, because clients choose the salts
                self._spaces.clear()
            space = self._spaces[facts] = self._new_space(key, layout)
        return space

    def key_fields(self, space: KeySpace, serde: str) -> KeyFields | None:
        """Return the key fields that belong to a key space. Return None for a space of another adapter.

        Args:
            space: A key space, possibly of another program.
            serde: The name and the digest of this adapter's serde, or "" if it has none.
        """
        layout = _LAYOUT.fullmatch(space.layout)
        group = space.pool.removeprefix(_GROUP)
        tenant, _, salt = space.tenant.rpartition("@")
        if (
            layout is None
            or (layout["serde"] or "", layout["server"] or "") != (serde, self.server)
            or (space.revision, tenant) != (self.revision, self.tenant)
            or not group.isdecimal()
        ):
            return None
        return KeyFields(space.model, int(layout["kv_rank"], 16), int(group), salt)

    def owner(self) -> KeySpace:
        """Return a key space of this adapter that is known before any object is seen."""
        return KeySpace(
            model=f"{_FORMAT};server={self.server}" if self.server else _FORMAT,
            dtype="uint8",
            layout=_FORMAT,
            page_tokens=1,
            page_nbytes=1,
            shard=Shard(layers=(0, 1)),
            pool="adapter",
            revision=self.revision,
            tenant=self.tenant,
        )

    def _new_space(self, key: ObjectKey, layout: Layout) -> KeySpace:
        rank = key.kv_rank >> 16 & 0xFF
        place = [f"rank={key.kv_rank:#010x}"]
        if self.server:
            place.append(f"server={self.server}")
        return KeySpace(
            model=key.model_name,
            dtype=layout.dtype,
            layout=";".join([_FORMAT, layout.text, *place]),
            page_tokens=max(1, layout.tokens),
            page_nbytes=layout.nbytes,
            shard=Shard(
                layers=(0, max(1, layout.layers)),
                heads=None if layout.is_latent else (rank, rank + 1),
            ),
            pool=f"{_GROUP}{key.object_group_id}",
            revision=self.revision,
            # A salt has no "@", so different pairs of tenant and salt have different texts.
            tenant=f"{self.tenant}@{key.cache_salt}" if self.tenant or key.cache_salt else "",
        )


def is_of_first_rank(space: KeySpace) -> bool:
    """Return whether a key space holds objects of the first rank and the first object group."""
    return space.pool == f"{_GROUP}0" and space.shard.heads in (None, (0, 1))


def page_hash(key: ObjectKey) -> str:
    """Return the page hash for a key.

    Raises:
        UnknownLayoutError: The chunk's hash is too short to identify a whole prefix.
    """
    if not _MIN_HASH_NBYTES <= len(key.chunk_hash) <= _MAX_HASH_NBYTES:
        raise UnknownLayoutError(
            f"a chunk's hash has {len(key.chunk_hash)} bytes, but needs 16 to 64: run LMCache"
            " with --hash-algorithm blake3 or sha256_cbor"
        )
    return key.chunk_hash.hex()
