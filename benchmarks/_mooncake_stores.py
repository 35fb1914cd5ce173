"""The stores that `mooncake_backend.py` compares: all call one native client, with the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import _sglang
from _store import Memory, Store

from hicache_storage import open_storage
from hicache_storage.frame import FramedPage
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.transfer import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.storage import HiCacheStorage

TIMEOUT_S = 600.0


class Cluster:
    """A storage that is open on a cluster, and its native client: for whoever calls that directly."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.storage: HiCacheStorage = open_storage("mooncake", self.config)
        self.native: Any = vars(vars(self.storage)["_client"])["_native"]

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


class OurStorage(Store):
    """`MooncakeStorage`, called directly on this thread: a page is one segment, stored bare."""

    name = "ours: MooncakeStorage"

    def __init__(self, cluster: Cluster, source: Memory, landing: Memory) -> None:
        super().__init__(source, landing)
        self._storage = open_storage("mooncake", cluster.config)
        self._space = key_space(source.page_nbytes)
        self._storage.open_space(self._space)
        self._sources = [Page(view) for view in source.views]
        self._targets = [Page(view) for view in landing.views]

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._storage.open_space(self._space)

    def set(self) -> None:
        if not all(self._storage.batch_set(self._space, self.hashes, self._sources)):
            raise RuntimeError(f"MooncakeStorage refused a page: {self._storage.stats()}")

    def get(self) -> None:
        if not all(self._storage.batch_get(self._space, self.hashes, self._targets)):
            raise RuntimeError(f"MooncakeStorage lost a page: {self._storage.stats()}")

    def close(self) -> None:
        self._storage.close()


class OurPages(Store):
    """The page store over `MooncakeStorage`: frames in registered memory, verdicts, its threads."""

    def __init__(
        self,
        cluster: Cluster,
        source: Memory,
        landing: Memory,
        *,
        checksum: Literal["xxh3", "none"] = "xxh3",
    ) -> None:
        super().__init__(source, landing)
        self.name = f"ours: page store, {checksum}"
        self._storage = open_storage("mooncake", cluster.config)
        chosen = PageStoreSettings(checksum=checksum, timeout_s=TIMEOUT_S)
        self._store = PageStore(self._storage, chosen)
        self._space = key_space(source.page_nbytes)
        self._store.open_space(self._space)
        self._headers = Memory(2 * source.pages, self._store.frame_nbytes)
        self._storage.register_buffer(self._headers.whole)
        self._sources = self._framed(source, 0)
        self._targets = self._framed(landing, source.pages)

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._store.open_space(self._space)

    def set(self) -> None:
        _expect_ok(self._store.save([Transfer(self._space, self.hashes, self._sources)]).verdicts)

    def get(self) -> None:
        _expect_ok(self._store.load([Transfer(self._space, self.hashes, self._targets)]).verdicts)

    def close(self) -> None:
        self._store.close()
        self._storage.close()

    def _framed(self, memory: Memory, first: int) -> list[FramedPage]:
        headers = self._headers.views[first : first + memory.pages]
        return [
            FramedPage(header, Page(view))
            for header, view in zip(headers, memory.views, strict=True)
        ]


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


def key_space(page_nbytes: int) -> KeySpace:
    """Of some MHA model whose pages have this size."""
    return KeySpace(
        model="benchmarks/model",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=64,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
    )


def _place(view: memoryview) -> tuple[int, int]:
    return Page(view).addresses[0]


def _expect_ok(verdicts: Sequence[Sequence[Verdict]]) -> None:
    for number, verdict in enumerate(verdicts[0]):
        if verdict is not Verdict.OK:
            raise RuntimeError(f"the page store said {verdict.value} of page {number}")
