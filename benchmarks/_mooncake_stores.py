"""The stores that `mooncake_backend.py` compares: all call one native client, with the same memory."""

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
    """A storage that is open on a cluster, and its native client: for whoever calls that directly."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.storage = self.opened()
        self.native: Any = vars(vars(self.storage)["_client"])["_native"]

    def opened(self) -> HiCacheStorage:
        """Another storage on it, the caller's to close: those of one config share a client."""
        return open_storage("mooncake", self.config)

    def empty(self) -> None:
        """Remove everything; what was just read is leased, and removed by force."""
        if self.native.remove_all(True) < 0:
            raise RuntimeError("the cluster could not be emptied")

    def touch(self, nbytes: int) -> None:
        """Have the lent memory mapped: the first write to it is slow, and measures the kernel."""
        piece = Memory(1, 4 << 20)
        address = piece.whole.ctypes.data
        self.native.register_buffer(address, piece.page_nbytes)
        for number in range(nbytes // piece.page_nbytes):
            self.native.put_from(f"touch/{number}", address, piece.page_nbytes)
        self.empty()
        self.native.unregister_buffer(address)


class RawClient(Store):
    """Mooncake's own batch calls, every result compared with what it must be."""

    name = "raw client"

    def __init__(self, cluster: Cluster, source: Memory, landing: Memory) -> None:
        super().__init__(source, landing)
        self._native = cluster.native
        self._sources = [address for address, _ in map(_place, source.views)]
        self._targets = [address for address, _ in map(_place, landing.views)]
        self._sizes = [source.page_nbytes] * source.pages

    def set(self) -> None:
        if any(self._native.batch_put_from(self.hashes, self._sources, self._sizes)):
            raise RuntimeError("the client refused a page")

    def get(self) -> None:
        found = self._native.batch_get_into(self.hashes, self._targets, self._sizes)
        if found != self._sizes:
            raise RuntimeError("the client lost a page")


class CarefulClient(RawClient):
    """The same, and as everybody who wants to know what a put has done, it looks before it puts."""

    name = "raw client, exists first"

    def set(self) -> None:
        if any(self._native.batch_is_exist(self.hashes)):
            raise RuntimeError("a page is there already")
        super().set()


class TheirStore(Store):
    """SGLang's `MooncakeStore` as its controller calls it, over pages that are one buffer each (MLA)."""

    name = "SGLang's MooncakeStore"

    def __init__(self, cluster: Cluster, source: Memory, landing: Memory) -> None:
        super().__init__(source, landing)
        self._backend = _sglang.mooncake_store(cluster.config, cluster.native)
        self._pools = {
            "set": _sglang.host_pool(source),
            "get": _sglang.host_pool(landing),
        }
        self._indices = range(source.pages)

    def set(self) -> None:
        self._backend.mem_pool_host = self._pools["set"]
        if not all(self._backend.batch_set_v1(self.hashes, self._indices)):
            raise RuntimeError("MooncakeStore refused a page")

    def get(self) -> None:
        self._backend.mem_pool_host = self._pools["get"]
        if not all(self._backend.batch_get_v1(self.hashes, self._indices)):
            raise RuntimeError("MooncakeStore lost a page")


def _place(view: memoryview) -> tuple[int, int]:
    return Page(view).addresses[0]
