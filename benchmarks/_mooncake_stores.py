"""The stores of `mooncake_backend.py`. All of them call one native client with the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import _sglang
from _store import Memory, Store

from hicache_storage import open_storage
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.storage import HiCacheStorage


class Cluster:
    """An open storage on a cluster, and its native client for direct calls."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.storage = self.opened()
        self.native: Any = vars(vars(self.storage)["_client"])["_native"]

    def opened(self) -> HiCacheStorage:
        """Return another storage with the same config. Both share one client. The caller closes it."""
        return open_storage("mooncake", self.config)

    def empty(self) -> None:
        """Remove every object by force, because objects that were just read are leased."""
        if self.native.remove_all(True) < 0:
            raise RuntimeError("the cluster could not be emptied")

    def touch(self, nbytes: int) -> None:
        """Write to all lent memory once, because the kernel makes the first write slow."""
        piece = Memory(1, 4 << 20)
        address = piece.whole.ctypes.data
        self.native.register_buffer(address, piece.page_nbytes)
        for number in range(nbytes // piece.page_nbytes):
            self.native.put_from(f"touch/{number}", address, piece.page_nbytes)
        self.empty()
        self.native.unregister_buffer(address)


class RawClient(Store):
    """Mooncake's own batch calls, with every result checked."""

    name = "raw client"

    def __init__(self, cluster: Cluster, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self._native = cluster.native
        self._sources = [address for address, _ in map(_address_range, source.views)]
        self._targets = [address for address, _ in map(_address_range, destination.views)]
        self._sizes = [source.page_nbytes] * source.pages

    def set(self) -> None:
        if any(self._native.batch_put_from(self.hashes, self._sources, self._sizes)):
            raise RuntimeError("the client refused a page")

    def get(self) -> None:
        found = self._native.batch_get_into(self.hashes, self._targets, self._sizes)
        if found != self._sizes:
            raise RuntimeError("the client lost a page")


class ExistsFirstClient(RawClient):
    """`RawClient` with a lookup before each put, because the result of a put hides what it did."""

    name = "raw client, exists first"

    def set(self) -> None:
        if any(self._native.batch_is_exist(self.hashes)):
            raise RuntimeError("a page is there already")
        super().set()


class SGLangMooncakeStore(_sglang.V1Store):
    """SGLang's `MooncakeStore`."""

    name = "SGLang's MooncakeStore"

    def __init__(self, cluster: Cluster, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self._use(_sglang.mooncake_store(cluster.config, cluster.native))


def _address_range(view: memoryview) -> tuple[int, int]:
    return Page(view).addresses[0]
