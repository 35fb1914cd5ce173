"""The stores of `s3.py`: bare sockets, boto3, obstore, SGLang's, and ours."""

from __future__ import annotations

import importlib
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import _sglang
from _s3_servers import BUCKET
from _store import Memory, Store
from hicache_backends.s3 import S3Storage

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.results import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # noqa: S105 - AWS's documentation's own
TIMEOUT_S = 600.0


class S3Store(Store):
    """A store on one server, under a prefix of its own."""

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self.port = port
        self.prefix = self.name.translate(str.maketrans(" :,", "---"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def object_names(self) -> list[str]:
        """Return the names of the objects of the batch that was prepared last."""
        return [f"{self.prefix}/{page_hash}" for page_hash in self.hashes]


class Loopback(S3Store):
    """The same bytes over several sockets, from and to memory, without HTTP."""

    def __init__(self, port: int, source: Memory, destination: Memory, *, connections: int) -> None:
        self.name = f"loopback, {connections} sockets"
        super().__init__(port, source, destination)
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def set(self) -> None:
        self._each(self._send, self.source)

    def get(self) -> None:
        self._each(self._receive, self.destination)
        self.destination.whole[:] = (
            self.source.whole
        )  # the received bytes are arbitrary, and `check` compares them

    def object_names(self) -> list[str]:
        return []

    def close(self) -> None:
        self._threads.shutdown()
        for one in self._sockets:
            one.close()

    def _each(
        self, move: Callable[[socket.socket, list[memoryview]], None], memory: Memory
    ) -> None:
        step = -(-memory.pages // len(self._sockets))
        parts = [memory.views[at : at + step] for at in range(0, memory.pages, step)]
        list(self._threads.map(move, self._sockets, parts))

    def _send(self, one: socket.socket, views: list[memoryview]) -> None:
        one.sendall(b"SINK %d\r\n\r\n" % sum(map(len, views)))
        for view in views:
            one.sendall(view)
        one.recv(1)

    def _receive(self, one: socket.socket, views: list[memoryview]) -> None:
        one.sendall(b"SOURCE %d\r\n\r\n" % sum(map(len, views)))
        for view in views:
            at = 0
            while at < len(view):
                at += one.recv_into(view[at:])


class Boto3(S3Store):
    """boto3 with threads, by its defaults or without its most expensive options."""

    def __init__(
        self, port: int, source: Memory, destination: Memory, *, threads: int, tuned: bool = False
    ) -> None:
        self.name = f"boto3{' tuned' if tuned else ''}, {threads} threads"
        super().__init__(port, source, destination)
        self._client = _boto3_client(self.url, threads, tuned=tuned)
        self._threads = ThreadPoolExecutor(threads)

    def set(self) -> None:
        list(self._threads.map(self._put, self.object_names(), self.source.views))

    def get(self) -> None:
        list(self._threads.map(self._read, self.object_names(), self.destination.views))

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _put(self, name: str, view: memoryview) -> None:
        self._client.put_object(Bucket=BUCKET, Key=name, Body=bytes(view))

    def _read(self, name: str, view: memoryview) -> None:
        body = self._client.get_object(Bucket=BUCKET, Key=name)["Body"]
        view[:] = body.read()


class Obstore(S3Store):
    """obstore with threads, without a signature over the payload."""

    def __init__(self, port: int, source: Memory, destination: Memory, *, threads: int) -> None:
        self.name = f"obstore, {threads} threads"
        super().__init__(port, source, destination)
        module: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        self._obstore = module
        self._store = stores.S3Store(
            BUCKET,
            endpoint=self.url,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        self._threads = ThreadPoolExecutor(threads)

    def set(self) -> None:
        list(self._threads.map(self._put, self.object_names(), self.source.views))

    def get(self) -> None:
        list(self._threads.map(self._read, self.object_names(), self.destination.views))

    def close(self) -> None:
        self._threads.shutdown()

    def _put(self, name: str, view: memoryview) -> None:
        self._obstore.put(self._store, name, view, use_multipart=False)

    def _read(self, name: str, view: memoryview) -> None:
        view[:] = memoryview(self._obstore.get(self._store, name).bytes())


class SeaweedFS(S3Store):
    """SGLang's S3 backend, called as its controller calls it, with pages in a host pool."""

    name = "SGLang SeaweedFSStore"

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(port, source, destination)
        self._pages = _HostPool(source), _HostPool(destination)
        self._backend = _sglang.seaweedfs_store(
            {
                "endpoint": self.url,
                "bucket": BUCKET,
                "prefix": self.prefix,
                "access_key": ACCESS_KEY,
                "secret_key": SECRET_KEY,
            }
        )

    def set(self) -> None:
        self._backend.mem_pool_host = self._pages[0]
        if not all(self._backend.batch_set_v1(self.hashes, range(len(self.hashes)))):
            raise RuntimeError("SeaweedFSStore refused a page")

    def get(self) -> None:
        self._backend.mem_pool_host = self._pages[1]
        if not all(self._backend.batch_get_v1(self.hashes, range(len(self.hashes)))):
            raise RuntimeError("SeaweedFSStore lost a page")

    def object_names(self) -> list[str]:
        return [f"{self._backend.key_prefix}/{page_hash}" for page_hash in self.hashes]


class _HostPool:
    """The part of a host pool that the backend uses: one token and one buffer a page."""

    page_size = 1

    def __init__(self, memory: Memory) -> None:
        self._meta = [address for page in memory.views for address in Page(page).addresses]

    def get_page_buffer_meta(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        found = [self._meta[index] for index in indices]
        return [address for address, _ in found], [nbytes for _, nbytes in found]


class Ours(S3Store):
    """`S3Storage`, called directly on this thread. A page is one segment without a frame."""

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        self.name = "ours: S3Storage"
        super().__init__(port, source, destination)
        self._storage = _storage(self)
        self._space = _key_space(source.page_nbytes)
        self._sources = [Page(view) for view in source.views]
        self._targets = [Page(view) for view in destination.views]

    def set(self) -> None:
        if not all(self._storage.batch_set(self._space, self.hashes, self._sources)):
            raise RuntimeError(f"S3Storage refused a page: {self._storage.stats()}")

    def get(self) -> None:
        if not all(self._storage.batch_get(self._space, self.hashes, self._targets)):
            raise RuntimeError(f"S3Storage lost a page: {self._storage.stats()}")

    def object_names(self) -> list[str]:
        return _our_names(self.prefix, self._space, self.hashes)

    def close(self) -> None:
        self._storage.close()


class OurPageStore(S3Store):
    """The page store over `S3Storage`: frames, checksums, verdicts, on its own threads."""

    def __init__(self, port: int, source: Memory, destination: Memory, *, threads: int) -> None:
        self.name = f"ours: page store, {threads} threads"
        super().__init__(port, source, destination)
        self._storage = _storage(self)
        settings = PageStoreSettings(timeout_s=TIMEOUT_S, parallelism=threads)
        self._store = PageStore(self._storage, settings)
        self._space = _key_space(source.page_nbytes)
        self._store.open_space(self._space)
        frame_nbytes = self._store.frame_nbytes
        self._framed = _key_space(source.page_nbytes, frame_nbytes)
        self._sources, self._targets = (
            [
                FramedPage(header, Page(view))
                for header, view in zip(
                    Memory(memory.pages, frame_nbytes).views, memory.views, strict=True
                )
            ]
            for memory in (source, destination)
        )

    def set(self) -> None:
        transfers = [Transfer(self._space, self.hashes, self._sources)]
        self._expect_ok(self._store.save(transfers).verdicts[0])

    def get(self) -> None:
        transfers = [Transfer(self._space, self.hashes, self._targets)]
        self._expect_ok(self._store.load(transfers).verdicts[0])

    def object_names(self) -> list[str]:
        return _our_names(self.prefix, self._framed, self.hashes)

    def close(self) -> None:
        self._store.close()
        self._storage.close()

    def _expect_ok(self, verdicts: Sequence[Verdict]) -> None:
        wrong = list(itertools.filterfalse(Verdict.OK.__eq__, verdicts))
        if wrong:
            raise RuntimeError(f"the page store returned {wrong[0].value}: {self._storage.stats()}")


def _storage(store: S3Store) -> S3Storage:
    return S3Storage.from_config(
        {
            "bucket": BUCKET,
            "prefix": store.prefix.replace("--", "-"),
            "endpoint_url": store.url,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "timeout_s": TIMEOUT_S,
        }
    )


def _our_names(prefix: str, space: KeySpace, hashes: Sequence[str]) -> list[str]:
    root = f"{prefix.replace('--', '-')}/{space.id}"
    return [f"{root}/{page_hash[:2]}/{page_hash}" for page_hash in hashes]


def _key_space(page_nbytes: int, frame_nbytes: int = 0) -> KeySpace:
    return KeySpace(
        model="benchmarks/model",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=64,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
        frame_nbytes=frame_nbytes,
    )


def _boto3_client(url: str, threads: int, *, tuned: bool) -> Any:
    boto3: Any = importlib.import_module("boto3")
    config: Any = importlib.import_module("botocore.config").Config
    cheaper: dict[str, Any] = {
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False, "addressing_style": "path"},
    }
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=config(max_pool_connections=threads, **(cheaper if tuned else {})),
    )
