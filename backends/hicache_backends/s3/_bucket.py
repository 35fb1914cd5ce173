"""The bucket as a whole, through boto3: checks, listings, deletion in batches.

boto3 prepares requests and reads answers; they travel over the connections, and within the deadlines, of
everything else.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import botocore.exceptions
from botocore.awsrequest import AWSResponse

from hicache_backends.s3._exchange import Failed
from hicache_storage.errors import ConfigError, HiCacheError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from hicache_backends.s3._client import Client
    from hicache_backends.s3._exchange import Call
    from hicache_backends.s3._replies import Reply
    from hicache_backends.s3._settings import S3Settings

DELETED_AT_ONCE = 1000
"""As many as the protocol allows."""
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")


@dataclass(frozen=True, slots=True)
class Listed:
    """An object that a listing shows."""

    name: str
    nbytes: int


class Bucket:
    """Thread-safe."""

    def __init__(self, boto: Any, client: Client, settings: S3Settings) -> None:
        self._boto = boto
        self._client = client
        self._settings = settings
        self._name = settings.bucket
        self._threads = threading.local()
        boto.meta.events.register("before-send.s3", self._send)

    def check(self) -> None:
        """See to it that the bucket is there.

        Raises:
            ConfigError: It is not, or is not ours to use; the message says what to do.
            StorageUnavailable, StorageTimeout: The store does not answer.
        """
        with self._deadline(), _translated():
            try:
                self._boto.head_bucket(Bucket=self._name)
            except botocore.exceptions.ClientError as error:
                status = _status(error)
                if status != 404:
                    raise self._unusable(status) from error
                if not self._settings.create_bucket:
                    raise ConfigError(
                        f"s3: bucket: {self._name} is not there: create it, or set create_bucket"
                    ) from error
                self._create()

    def objects(self, prefix: str) -> Iterator[Listed]:
        """Every object whose name begins with `prefix`."""
        more: dict[str, str] = {}
        while True:
            with self._deadline(), _translated():
                page = self._boto.list_objects_v2(Bucket=self._name, Prefix=prefix, **more)
            for found in page.get("Contents", ()):
                yield Listed(found["Key"], found["Size"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, names: Sequence[str]) -> set[str]:
        """Delete objects; the names of those that the store did not delete."""
        kept: set[str] = set()
        with self._deadline(), _translated():
            for start in range(0, len(names), DELETED_AT_ONCE):
                part = names[start : start + DELETED_AT_ONCE]
                answer = self._boto.delete_objects(
                    Bucket=self._name,
                    Delete={"Objects": [{"Key": name} for name in part], "Quiet": True},
                )
                kept.update(error["Key"] for error in answer.get("Errors", ()))
        return kept

    def _create(self) -> None:
        region = self._client.target.region
        placed: dict[str, Any] = {}
        if region != "us-east-1":
            placed = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self._boto.create_bucket(Bucket=self._name, **placed)
        except botocore.exceptions.ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def _unusable(self, status: int) -> HiCacheError:
        if status in (401, 403):
            return ConfigError(
                f"s3: bucket: {self._name} denies access ({status}): check the credentials, that their"
                " policy has s3:ListBucket, and the clock"
            )
        if status in (301, 307, 400):
            return ConfigError(
                f"s3: region: bucket {self._name} is not served there ({status}): set its region"
            )
        return StorageUnavailable(f"s3: the store of bucket {self._name} answers {status}")

    # --- how boto3's requests travel -----------------------------------------------------------------

    @contextmanager
    def _deadline(self) -> Generator[None, None, None]:
        self._threads.deadline_s = time.monotonic() + self._settings.timeout_s
        yield

    def _send(self, request: Any, **_: object) -> AWSResponse:
        """Called by botocore in place of its own sending."""
        address: str = request.url
        url = urlsplit(address)
        if url.netloc != self._client.target.authority:
            raise ConfigError(
                f"s3: region: bucket {self._name} is served at {url.hostname}: set its region"
            )
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
        }
        headers = {name: text for name, text in headers.items() if name != "content-length"}
        body = request.body or b""
        call = self._answered(request.method, f"{url.path}?{url.query}", headers, body)
        (outcome,) = self._client.run([call], self._threads.deadline_s)
        if isinstance(outcome, Failed):
            raise outcome.error
        headers_read: Any = outcome.headers
        return AWSResponse(address, outcome.status, headers_read, _Body(outcome.body))

    def _answered(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Call[Reply]:
        target = target.removesuffix("?")
        answer = yield from self._client.answered(
            lambda: self._client.prepared(method, target, headers, body)
        )
        return answer.reply


class _Body:
    """As much of urllib3's response as botocore reads."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body


@contextmanager
def _translated() -> Generator[None, None, None]:
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise StorageUnavailable(
            f"s3: the store refuses {error.operation_name}: {_code(error)}"
        ) from error
    except botocore.exceptions.BotoCoreError as error:
        raise StorageUnavailable(
            f"s3: the store's answer can't be read: {type(error).__name__}"
        ) from error


def _status(error: botocore.exceptions.ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _code(error: botocore.exceptions.ClientError) -> str:
    """The error's name, if it looks like one."""
    found = _CODE.fullmatch(str(error.response.get("Error", {}).get("Code", "")))
    return found[0] if found else "an error without a name"
