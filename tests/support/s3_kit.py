"""What the tests of `s3` share: a config for a server, and back doors to the bucket."""

from __future__ import annotations

import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from hicache_conformance import Scratch, StorageConformance
from servers import Ministack

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from servers import S3Server
    from types_boto3_s3 import S3Client

    from hicache_storage.keys import KeySpace

BUCKET = "pages"


def config_of(server: S3Server, prefix: str = "", **fields: Any) -> dict[str, Any]:
    """Return the config of a store on `server`."""
    return {
        "bucket": BUCKET,
        "prefix": prefix,
        "endpoint_url": server.endpoint_url,
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "create_bucket": True,
        **fields,
    }


@contextmanager
def plain_client(server: S3Server) -> Generator[S3Client, None, None]:
    """Yield a plain boto3 client."""
    client: S3Client = cast("Any", boto3).client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    with closing(client):
        yield client


def make_ready(server: S3Server, bucket: str = BUCKET) -> None:
    """Create the bucket and write to it, because on some servers the first write takes seconds."""
    with plain_client(server) as client:
        client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="first", Body=b"page")


def read_object(server: S3Server, name: str, bucket: str = BUCKET) -> bytes | None:
    """Return the bytes of an object, or None if it does not exist."""
    with plain_client(server) as client:
        try:
            answer = client.get_object(Bucket=bucket, Key=name)
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                return None
            raise
        with closing(answer["Body"]) as body:
            return body.read()


def write_object(server: S3Server, name: str, data: bytes | None, bucket: str = BUCKET) -> None:
    """Replace an object, or delete it if `data` is None."""
    with plain_client(server) as client:
        if data is None:
            client.delete_object(Bucket=bucket, Key=name)
        else:
            client.put_object(Bucket=bucket, Key=name, Body=data)


class BucketHost(Ministack):
    """A server that takes the host 127.1 for the bucket `127` of the host `1`.

    Clients that address a bucket by its host need no name server, because 127.1 is 127.0.0.1.
    """

    bucket = "127"

    @property
    def config(self) -> dict[str, Any]:
        """The address of the bucket and the keys."""
        return {
            "endpoint": f"{self.bucket}.1:{self.port}",
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), "MINISTACK_HOST": "1"}

    def start(self) -> None:
        """Start the server. The first start also creates the bucket."""
        fresh = not self.log.exists()
        super().start()
        if fresh:
            make_ready(self, self.bucket)


def name_of(space: KeySpace, page_hash: str, prefix: str = "") -> str:
    """Return the name of the object that holds a page."""
    return f"{prefix}/{space.id}/{page_hash[:2]}/{page_hash}".removeprefix("/")


class S3Conformance(StorageConformance):
    """The kit on one kind of server. Tests share a server, except those that stop it."""

    server_class: ClassVar[type[S3Server]]
    shared_server: ClassVar[S3Server]
    timeout_s: ClassVar[float] = 10.0
    own_server: S3Server | None = None
    prefix = ""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with cls.server_class(tmp_path_factory.mktemp("server")) as server:
            cls.shared_server = server
            make_ready(server)
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.prefix = scratch.prefix
        return config_of(self._server, self.prefix, timeout_s=self.timeout_s)

    @contextmanager
    def server(self) -> Generator[S3Server, None, None]:
        with (
            tempfile.TemporaryDirectory() as directory,
            self.server_class(Path(directory)) as server,
        ):
            self.own_server = server
            make_ready(server)
            yield server

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_object(self._server, name_of(space, page_hash, self.prefix))

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_object(self._server, name_of(space, page_hash, self.prefix), data)

    @property
    def _server(self) -> S3Server:
        return self.own_server or self.shared_server
