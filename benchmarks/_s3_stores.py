"""The stores of `s3.py`: boto3, obstore, SGLang's, and ours."""

from __future__ import annotations

import http.client
import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import _sglang
from _our_stores import TIMEOUT_S, OurPageStore, OurStorage, key_space
from _store import Memory, Store
from hicache_backends.s3 import S3Storage

from hicache_storage.page_store.frame import FRAME_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.keys import KeySpace

BUCKET = "pages"
ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # noqa: S105 - AWS's documentation's own


class S3Store(Store):
    """A store on one server, under its own prefix."""

    port: int
    prefix: str

    def place(self, port: int) -> str:
        """Choose a prefix. Return the URL of the server."""
        self.port = port
        self.prefix = re.sub("[^A-Za-z0-9]+", "-", self.name)
        return f"http://127.0.0.1:{port}"

    def object_names(self) -> list[str]:
        """Return the object names of the batch that was prepared last."""
        return [f"{self.prefix}/{page_hash}" for page_hash in self.hashes]

    def clear(self) -> None:
        """Delete the objects of the batch that was prepared last."""
        request(self.port, "DELETE", self.object_names())


class Boto3(S3Store):
    """boto3 with threads, with its defaults or without its most expensive options."""

    def __init__(
        self, port: int, source: Memory, destination: Memory, *, threads: int, tuned: bool = False
    ) -> None:
        super().__init__(source, destination)
        self.name = f"boto3{' tuned' if tuned else ''}, {threads} threads"
        self._client = _boto3_client(self.place(port), threads, tuned=tuned)
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
        super().__init__(source, destination)
        self.name = f"obstore, {threads} threads"
        module: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        self._obstore = module
        self._store = stores.S3Store(
            BUCKET,
            endpoint=self.place(port),
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


class SeaweedFS(_sglang.V1Store, S3Store):
    """SGLang's S3 backend."""

    name = "SGLang SeaweedFSStore"

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        url = self.place(port)
        self._use(
            _sglang.seaweedfs_store(
                {
                    "endpoint": url,
                    "bucket": BUCKET,
                    "prefix": self.prefix,
                    "access_key": ACCESS_KEY,
                    "secret_key": SECRET_KEY,
                }
            )
        )

    def object_names(self) -> list[str]:
        return [f"{self._backend.key_prefix}/{page_hash}" for page_hash in self.hashes]


class _OnS3Storage(S3Store):
    """A store over `S3Storage`, with the names that it gives objects."""

    def object_names(self) -> list[str]:
        root = f"{self.prefix}/{self.stored_space.id}"
        return [f"{root}/{page_hash[:2]}/{page_hash}" for page_hash in self.hashes]

    @property
    def stored_space(self) -> KeySpace:
        """The key space as the storage sees it."""
        raise NotImplementedError


class Ours(OurStorage, _OnS3Storage):
    """`S3Storage`, called directly on this thread. A page is one segment without a frame."""

    def __init__(self, port: int, source: Memory, destination: Memory) -> None:
        self.port, self.prefix = port, "ours-S3Storage"
        super().__init__(_storage(self), source, destination)

    @property
    def stored_space(self) -> KeySpace:
        return key_space(self.source.page_nbytes)


class OurPagesOnS3(OurPageStore, _OnS3Storage):
    """The page store over `S3Storage`: frames, checksums and verdicts, on its own threads."""

    def __init__(
        self, port: int, source: Memory, destination: Memory, *, threads: int, scheme: str = "http"
    ) -> None:
        self.port, self.prefix = port, f"ours-page-store-{threads}-threads"
        super().__init__(_storage(self, scheme), source, destination, parallelism=threads)
        self.name = f"ours: page store, {threads} threads"

    @property
    def stored_space(self) -> KeySpace:
        return replace(key_space(self.source.page_nbytes), frame_nbytes=FRAME_NBYTES)


def _storage(store: S3Store, scheme: str = "http") -> S3Storage:
    return S3Storage.from_config(
        {
            "bucket": BUCKET,
            "prefix": store.prefix,
            "endpoint_url": f"{scheme}://127.0.0.1:{store.port}",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "timeout_s": TIMEOUT_S,
            "tls_verify": False,
        }
    )


def request(port: int, method: str, names: Iterable[str] = ("",)) -> None:
    """Send unsigned requests about the bucket or its objects. Both servers accept them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    for name in names:
        connection.request(method, f"/{BUCKET}/{name}".rstrip("/"))
        connection.getresponse().read()
    connection.close()


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
