"""The host pools of one rank: the anchor, side pools, and draft pools, which are registered later."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.sglang._identity import Identity
from hicache_storage.integrations.sglang._stored_pool import StoredPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.integrations.sglang._engine import HostPool, StorageConfig
    from hicache_storage.integrations.sglang._launch import LaunchIdentity
    from hicache_storage.integrations.sglang._transport import Transport

logger = logging.getLogger(__name__)

ANCHOR = "kv"
_MAMBA = "mamba"


class PoolTable:
    """The pools by name. One thread registers pools while other threads look up pools."""

    def __init__(
        self,
        config: StorageConfig,
        launch: LaunchIdentity,
        tenant: str,
        transport: Transport,
        index_key_order: Callable[[], str],
    ) -> None:
        self._config = config
        self._launch = launch
        self._tenant = tenant
        self._transport = transport
        self._index_key_order = index_key_order
        self._store = transport.store
        self._replicated = bool(config.is_mla_model)
        self._page_tokens = 0
        self._device = ""
        self._pools: dict[str, StoredPool] = {}

    def __getitem__(self, name: str) -> StoredPool:
        return self._pools[name]

    def all(self) -> list[StoredPool]:
        """Return all pools that are registered now."""
        return list(self._pools.values())

    def register(self, name: str, host: HostPool) -> None:
        """Register a pool, unless it is already registered. Replace a different pool of the same name.

        Raises:
            ConfigError: The identity of the pages is unknown.
            StorageUnavailable, StorageTimeout: The store does not answer.
        """
        former = self._pools.get(name)
        if former is not None and former.host is host:
            return
        if name == ANCHOR:
            self._page_tokens = host.page_size
            on_device = getattr(host, "device_pool", None)
            self._device = str(getattr(host, "_transfer_device", getattr(on_device, "device", "")))
        identity = Identity(
            config=self._config,
            launch=self._launch,
            tenant=self._tenant,
            page_tokens=self._page_tokens,
            replicated=self._replicated,
            index_key_order=self._index_key_order,
            device=self._device,
        )
        self._require_writer()
        pool = StoredPool(name, host, identity)
        for space in pool.spaces:
            self._store.open_space(space)
        if self._store.lends_memory:
            if former is not None:
                self._unregister_buffers(former)
            self._register_buffers(pool)
        self._pools[name] = pool
        self._transport.writes_replicated = identity.is_first_replica
        self._enable_writes(pool, identity)
        logger.info("pool %s is stored as %s", name, [space.manifest() for space in pool.spaces])

    def close(self) -> None:
        """Unregister all pools and their memory."""
        pools = self.all() if self._store.lends_memory else []
        self._pools.clear()
        for pool in pools:
            self._unregister_buffers(pool)

    def _require_writer(self) -> None:
        """Refuse an engine in which nobody would write the pages of some ranks.

        Raises:
            ConfigError: This version of SGLang cannot write on every context-parallel rank.
        """
        config = self._config
        has_one = hasattr(config, "is_storage_writer") or config.attn_cp_size == 1
        if self._replicated and not has_one:
            raise ConfigError(
                "sglang: with MLA and context parallelism, this version of SGLang writes only the pages"
                " of the first rank, so the others would never find a page: use SGLang 0.5.23"
            )

    def _enable_writes(self, pool: StoredPool, identity: Identity) -> None:
        """Make SGLang back up a pool that this rank has to write, although SGLang elects another rank.

        If KV is MLA, only rank 0 of SGLang writes, except for Mamba states (`should_backup`,
        hybrid_cache_controller.py). The draft heads of the other ranks, and the pages of other
        context-parallel ranks, would never be stored, so no prefix would ever be complete. After the
        attach, only `is_storage_writer` reads the changed flag.
        """
        config = self._config
        if not config.is_mla_model or config.tp_rank == 0 or pool.name == _MAMBA:
            return
        if not identity.writes(pool.name, pool.host):
            return
        if not hasattr(config, "is_storage_writer"):
            logger.warning(
                "pool %r gets no hits, because in this version of SGLang only rank 0 writes it"
                " of an MLA model: use SGLang 0.5.23",
                pool.name,
            )
            return
        config.is_mla_model = False

    def _register_buffers(self, pool: StoredPool) -> None:
        for buffer in pool.buffers:
            try:
                self._store.register_buffer(buffer)
            except Exception:
                logger.warning(
                    "the store cannot register the memory of pool %r, and will copy its pages",
                    pool.name,
                    exc_info=True,
                )

    def _unregister_buffers(self, pool: StoredPool) -> None:
        for buffer in pool.buffers:
            try:
                self._store.unregister_buffer(buffer)
            except Exception:
                logger.debug("a buffer of pool %r was not registered", pool.name, exc_info=True)
