"""SpoolCache's `TokenFileStore`: one file per chunk of a prompt, for each rank of each deployment.

A page is the first chunk of a prompt, because SpoolCache's keys are those of prompts. A chunk has all
pools of its tokens, so a page of a pool other than KV is not a file. The connector passes on these
fields of a key space: model and revision (`model_namespace_sha256`), dtype, memory layout (with the
attention backend, in a hash of vLLM's config), the shard (as layer names, rank and sizes), the size of a
page and the tenant (as `cache_salt`).
"""

from __future__ import annotations

import hashlib
import importlib
import struct
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import (
    EQUAL_PARTS_ONLY,
    NO_CHECKSUM,
    NO_CLEAR,
    NO_CONFIG_CHECK,
    NO_LISTING,
    NO_READ_ONLY,
    AdaptedStorage,
    equal_part,
)
from field.vllm.connectors import ModelSettings
from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

CHUNK_TOKENS = 256


class SpoolCacheSettings(ModelSettings):
    """Settings of the engine and the connector."""

    path: str
    """`spoolcache_path`."""


class Rank:
    """The store of one rank of one deployment, as the connector's worker opens it."""

    def __init__(self, space: KeySpace, settings: SpoolCacheSettings) -> None:
        self._deployment, layout, self._rank = _identity(space, settings)
        self._salt = space.tenant
        self.root = Path(settings.path) / self._deployment / f"rank-{self._rank:04d}"
        self._identity = {
            "expected_deployment_digest": self._deployment,
            "expected_rank_digest": _sha256(self._deployment, str(self._rank), layout.digest),
            "expected_rank": self._rank,
            "expected_topology_digest": _sha256(self._deployment),
            "expected_profile": layout.profile,
            "expected_layout_digest": layout.digest,
        }
        self._layout = layout
        self.store: Any = None

    def open(self) -> None:
        """Open the files. The worker also takes a lease that lets nobody else open them; the kit would.

        Raises:
            StorageUnavailable: The files can't be opened, or are those of another rank.
        """
        try:
            self.store = _module("token_files").TokenFileStore(
                self.root, layout=self._layout, **self._identity
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StorageUnavailable(f"SpoolCache: {self.root}: {error}") from error

    def key(self, page_hash: str) -> str:
        """Return the key of a prompt of one chunk, whose tokens the page hash names."""
        digest = hashlib.sha256(page_hash.encode()).digest() * (CHUNK_TOKENS // 8)
        tokens = struct.unpack(f"<{CHUNK_TOKENS}I", digest)
        (prefix,) = _module("prefix").prefix_digests(
            tokens,
            deployment_digest=self._deployment,
            cache_salt=self._salt,
            chunk_tokens=CHUNK_TOKENS,
        )
        return str(prefix.digest)

    def path_of(self, page_hash: str) -> Path:
        key = self.key(page_hash)
        return self.root / "manifests" / key[:2] / f"{key}.kv"


class SpoolCache(AdaptedStorage):
    """`spoolcache.token_files.TokenFileStore`."""

    distribution = "spoolcache"
    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_CLEAR,
        **NO_CHECKSUM,
        **NO_LISTING,
        **NO_READ_ONLY,
        **EQUAL_PARTS_ONLY,
        "open_space": "a file has all pools of its tokens, and ranks hold equal parts",
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        overwrites=False,
        scatter_gather=False,
    )

    def __init__(self, settings: SpoolCacheSettings) -> None:
        self._settings = settings
        self._ranks: dict[KeySpace, Rank] = {}
        self._lock = threading.Lock()
        self._worker = threading.Lock()
        """Held during each call, because vLLM's worker restores and saves one request at a time."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(SpoolCacheSettings.parse("spoolcache", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self.rank(space)

    def rank(self, space: KeySpace) -> Rank:
        """Return the rank that holds the shard. The first use opens its files."""
        if space.pool != "kv":
            raise UnsupportedOperation(f"a file has all pools of its tokens, not {space.pool!r}")
        self.ensure_open()
        with self._lock:
            if space not in self._ranks:
                rank = Rank(space, self._settings)
                rank.store = next(
                    (one.store for one in self._ranks.values() if one.root == rank.root), None
                )
                if rank.store is None:
                    rank.open()
                self._ranks[space] = rank
            return self._ranks[space]

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        rank = self.rank(space)
        with self._worker:
            self.ensure_open()
            return [rank.store.lookup(rank.key(one)).is_hit for one in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        with self._worker:
            self.ensure_open()
            return [
                _restore(rank.store, rank.key(one), page)
                for one, page in zip(hashes, pages, strict=True)
            ]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        rank = self.rank(space)
        with self._worker:
            self.ensure_open()
            return [
                _commit(rank.store, rank.key(one), page)
                for one, page in zip(hashes, pages, strict=True)
            ]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Evict pages as its capacity reclamation does."""
        rank = self.rank(space)
        with self._worker:
            self.ensure_open()
            for page_hash in hashes:
                rank.store.evict(rank.key(page_hash))
        return [True] * len(hashes)

    def close(self) -> None:
        if not self._closed:
            super().close()
            with self._lock:
                stores = {id(one.store): one.store for one in self._ranks.values()}
            if not self.is_forked_copy:
                with self._worker:
                    for store in stores.values():
                        store.close()

    def path_of(self, space: KeySpace, page_hash: str) -> Path:
        """Return the file of a page, for back doors."""
        return Rank(space, self._settings).path_of(page_hash)


def _restore(store: Any, key: str, page: Page) -> bool:
    """Read a chunk as the mover does before it copies it to the GPU. Errors go on to the caller."""

    @contextmanager
    def receiver(_: Any) -> Generator[Callable[[memoryview], None], None, None]:
        yield received.extend

    received = bytearray()
    with store.restore_view(key) as view:
        if not view.result.is_hit:
            return False
        store.stream_objects(view.descriptors, receiver, lease=view)
    page.copy_from(received)
    return True


def _commit(store: Any, key: str, page: Page) -> bool:
    """Store a chunk that is not there, as the mover does. A failure skips the save, as in the worker."""
    try:
        if store.valid_chunk(key, None, CHUNK_TOKENS) is None:
            store.commit_chunk(key, None, CHUNK_TOKENS, page.tobytes())
    except Exception:  # noqa: BLE001 - the worker skips a save after any error
        return False
    return True


def _identity(space: KeySpace, settings: SpoolCacheSettings) -> tuple[str, Any, int]:
    """Return the deployment's digest, the rank's layout and its number, as the connector makes them."""
    shard, identity, hma = space.shard, _module("identity"), _module("hma")
    heads = shard.heads and equal_part(shard.heads, settings.total_heads, "heads")
    stage, stages = equal_part(shard.layers, settings.total_layers, "layers")
    tp_rank, tp = heads or (0, 1)
    context_rank, context = shard.context or (0, 1)
    ranks = tp * context
    name = f"layers.{shard.layers[0]}-{shard.layers[1]}"
    layer = hma.LayerGeometry(name, f"attention-{space.page_tokens}", space.stored_nbytes)
    group = hma.GroupGeometry(
        group_index=0,
        spec_name=layer.spec_name,
        block_size=CHUNK_TOKENS // context,
        storage_block_size=CHUNK_TOKENS // context,
        manager_page_size_bytes=space.stored_nbytes,
        dcp_replicated=False,
        dcp_shard_count=context,
        logical_tokens_per_page=CHUNK_TOKENS // context * context,
        reuse_policy="full",
        reuse_window_tokens=None,
        running_state_tail_pages=0,
        is_eagle_group=False,
        layers=(layer,),
    )
    layout = hma.HMALayout(num_manager_blocks=1024, dcp_degree=context, groups=(group,))
    model = SimpleNamespace(model=space.model, revision=space.revision)
    sizes = (space.page_tokens, space.page_nbytes, space.stored_nbytes)
    config = _sha256(space.model, space.dtype, space.layout, *map(str, sizes))
    deployment = identity.DeploymentIdentity(
        schema="spoolcache-deployment/v2",
        profile=layout.profile,
        model_namespace_sha256=identity.model_namespace_sha256(model),
        model_config_sha256=config,
        execution_config_sha256=config,
        vllm_version="0.33.0",
        vllm_build_sha256=_sha256("0.33.0"),
        kv_cache_dtype=space.dtype,
        topology={
            "tp": ranks,
            "pp": stages,
            "dcp": context,
            "dp": 1,
            "dp_rank": 0,
            "world_size": ranks * stages,
            "world_size_across_dp": ranks * stages,
        },
        layout_sha256=layout.logical_digest,
        chunk_tokens=CHUNK_TOKENS,
        spoolcache_version="0.3.0",
    )
    return deployment.digest, layout, (stage * tp + tp_rank) * context + context_rank


def _sha256(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _module(name: str) -> Any:
    return importlib.import_module(f"spoolcache.{name}")
