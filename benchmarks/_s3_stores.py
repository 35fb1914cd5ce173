"""The stores of `s3.py`: bare sockets, boto3, obstore, SGLang's, and ours."""

from __future__ import annotations

import importlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import _sglang
from _our_stores import TIMEOUT_S, OurPageStore, OurStorage, key_space
from _s3_servers import BUCKET
from _store import Memory, Store
from hicache_backends.s3 import S3Storage

from hicache_storage.page import Page
from hicache_storage.page_store.frame import FRAME_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # noqa: S105 - AWS's documentation's own


class S3Store(Store):
    """A store on one server, under a prefix of its own."""

    scheme = "http"

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self.port = port
        self.prefix = self.name.translate(str.maketrans(" :,", "---"))

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

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

    name = "ours: S3Storage"

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(port, source, destination)
        self._store = self.opened()
        self._space = key_space(source.page_nbytes)

    def opened(self) -> Store:
        return OurStorage(_storage(self), self.source, self.destination)

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._store.prepare_set(hashes)

    def set(self) -> None:
        self._store.set()

    def prepare_get(self, hashes: Sequence[str]) -> None:
        super().prepare_get(hashes)
        self._store.prepare_get(hashes)

    def get(self) -> None:
        self._store.get()

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        self._store.set_part(hashes, part)

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        self._store.get_part(hashes, part)

    def object_names(self) -> list[str]:
        root = f"{_storage_prefix(self)}/{self._space.id}"
        return [f"{root}/{page_hash[:2]}/{page_hash}" for page_hash in self.hashes]

    def close(self) -> None:
        self._store.close()


class OurPagesOnS3(Ours):
    """The page store over `S3Storage`: frames, checksums, verdicts, on its own threads."""

    def __init__(self, port: int, source: Memory, destination: Memory, *, threads: int) -> None:
        self.name = f"ours: page store, {threads} threads"
        self._threads = threads
        super().__init__(port, source, destination)
        self._space = replace(self._space, frame_nbytes=FRAME_NBYTES)

    def opened(self) -> Store:
        return OurPageStore(
            _storage(self), self.source, self.destination, parallelism=self._threads
        )


class OurPagesOnS3OverTls(OurPagesOnS3):
    """The same over TLS."""

    scheme = "https"


def _storage(store: S3Store) -> S3Storage:
    return S3Storage.from_config(
        {
            "bucket": BUCKET,
            "prefix": _storage_prefix(store),
            "endpoint_url": store.url,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "timeout_s": TIMEOUT_S,
            "tls_verify": False,
        }
    )


def _storage_prefix(store: S3Store) -> str:
    return store.prefix.replace("--", "-")


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
