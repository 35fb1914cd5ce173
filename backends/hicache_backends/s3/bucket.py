"""Operations on the whole bucket, through boto3: checks, listings and batch deletion.

boto3 prepares the requests and parses the answers. They travel on this backend's connections, under
the deadline of their call.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import botocore.exceptions
from botocore.awsrequest import AWSResponse

from hicache_backends.s3.client import denial_advice, is_denied
from hicache_backends.s3.losses import CallFailed
from hicache_storage.errors import ConfigError, HiCacheError, NoSuchStore, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from hicache_backends.s3.client import Client
    from hicache_backends.s3.exchange import Call
    from hicache_backends.s3.replies import Reply
    from hicache_backends.s3.settings import S3Settings
    from hicache_storage.backend_support.deadline import Deadline

_DELETE_BATCH = 1000
"""The most names that the protocol allows in a batch delete."""
_GONE_CODES = frozenset({"NoSuchKey", "NoSuchVersion"})
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing."""

    name: str
    nbytes: int


class Bucket:
    """The bucket's operations. Thread-safe."""

    def __init__(self, boto: Any, client: Client, settings: S3Settings) -> None:
        self._boto = boto
        self._client = client
        self._settings = settings
        self._name = settings.bucket
        self._threads = threading.local()
        boto.meta.events.register("before-send.s3", self._send)

    def check(self, deadline: Deadline, *, creates: bool) -> None:
        """Check that the bucket exists. `creates`: create a missing bucket.

        Raises:
            NoSuchStore: The bucket does not exist, but engines would create it.
            ConfigError: The bucket does not exist or denies access; the message says what to do.
            StorageUnavailable, StorageTimeout: The store does not answer.
        """
        with self._boto_call(deadline):
            try:
                self._boto.head_bucket(Bucket=self._name)
            except botocore.exceptions.ClientError as error:
                if _status(error) != 404:
                    raise self._head_error(error) from None
                if not creates:
                    no_bucket = NoSuchStore if self._settings.create_bucket else ConfigError
                    raise no_bucket(
                        f"s3: bucket: {self._name} is not there: create it, or set create_bucket for"
                        " a program that writes"
                    ) from None
                self._create()

    def server_name(self, deadline: Deadline) -> str:
        """Return the store's name for itself (the header `Server`), or "" if it gives none."""
        with self._boto_call(deadline):
            answer = self._boto.head_bucket(Bucket=self._name)
            name: str = answer["ResponseMetadata"]["HTTPHeaders"].get("server", "")
        return name if name.isprintable() else ""

    def list_page(
        self, prefix: str, position: str, deadline: Deadline
    ) -> tuple[list[ListedObject], str | None]:
        """Return up to 1,000 objects whose names begin with `prefix`, and the next position.

        The first position is an empty string. The position after the last objects is None. An object
        that the answer has twice is returned once: RustFS (its issue 2439) and rclone list some so.
        """
        with self._boto_call(deadline):
            answer, following = self._list(Prefix=prefix, ContinuationToken=position)
            found = {
                one["Key"]: ListedObject(one["Key"], one["Size"])
                for one in answer.get("Contents", ())
            }
        return list(found.values()), following

    def list_folders(
        self, prefix: str, position: str, deadline: Deadline
    ) -> tuple[list[str], str | None]:
        """Return the parts of names between `prefix` and the next slash, and the next position."""
        with self._boto_call(deadline):
            answer, following = self._list(Prefix=prefix, ContinuationToken=position, Delimiter="/")
            folders: list[str] = [one["Prefix"] for one in answer.get("CommonPrefixes", ())]
        return [name.removeprefix(prefix).removesuffix("/") for name in folders], following

    def _list(self, **arguments: str) -> tuple[Any, str | None]:
        """Return the answer to a listing, and the position of what follows."""
        given = {name: value for name, value in arguments.items() if value}
        answer = self._boto.list_objects_v2(Bucket=self._name, **given)
        # `IsTruncated` is required, because without it the listing may be incomplete.
        following: str | None = answer["NextContinuationToken"] if answer["IsTruncated"] else None
        if following is not None and following in ("", arguments["ContinuationToken"]):
            raise StorageUnavailable(f"s3: the listing of bucket {self._name} stops before its end")
        return answer, following

    def delete(self, names: Sequence[str], deadline: Deadline) -> dict[str, str]:
        """Delete objects. Return the names of the objects that remain, each with the reason.

        An object counts as deleted only if the answer reports it as deleted and not also as an
        error.
        """
        kept: dict[str, str] = {}
        for start in range(0, len(names), _DELETE_BATCH):
            part = names[start : start + _DELETE_BATCH]
            with self._boto_call(deadline):
                answer = self._boto.delete_objects(
                    Bucket=self._name, Delete={"Objects": [{"Key": name} for name in part]}
                )
                errors = {one["Key"]: str(one.get("Code")) for one in answer.get("Errors", ())}
                gone = {one["Key"] for one in answer.get("Deleted", ())}
            for name in part:
                code = errors.get(name, "")
                if code not in _GONE_CODES and (code or name not in gone):
                    kept[name] = _error_name(code)
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

    def _denial_code(self) -> str:
        """Find the name of the error with a GET, because the answer to a HEAD has no body."""
        try:
            self._boto.list_objects_v2(Bucket=self._name, MaxKeys=1)
        except botocore.exceptions.ClientError as error:
            return code if (code := _code(error)).isalpha() else ""
        except HiCacheError:
            return ""
        return ""

    def _head_error(self, error: botocore.exceptions.ClientError) -> HiCacheError:
        status = _status(error)
        there = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = there.get("x-amz-bucket-region")
        is_elsewhere = region is not None and region != self._client.target.region
        if status in (301, 307) or (status == 400 and is_elsewhere):
            return ConfigError(
                f"s3: region: bucket {self._name} is not served there ({status}): set its region"
                + (f", {region}" if is_elsewhere else "")
            )
        if status in (400, 401, 403) and self._settings.anonymous:
            return ConfigError(
                f"s3: anonymous: bucket {self._name} does not answer requests without a signature"
                f" ({status}): give credentials, and leave anonymous false"
            )
        if status in (401, 403):
            code = self._denial_code()
            shown = f"{status} {code}".strip()
            return ConfigError(
                f"s3: bucket: {self._name} denies access ({shown}): {denial_advice(code)}"
            )
        if status == 400:
            return ConfigError(
                f"s3: bucket: the request for {self._name} is refused ({status}): check the region, that"
                " the credentials have not expired, and addressing_style"
            )
        return StorageUnavailable(f"s3: the store of bucket {self._name} answers {status}")

    # --- transport of boto3's requests -----------------------------------------------------------------

    @contextmanager
    def _boto_call(self, deadline: Deadline) -> Generator[None, None, None]:
        """Let boto3 send under this deadline. Translate its errors, whose text may contain secrets."""
        self._threads.deadline = deadline
        try:
            yield
        except HiCacheError:
            raise
        except botocore.exceptions.ClientError as error:
            if is_denied(_status(error), _code(error)):
                self._client.invalidate_keys()
            raise StorageUnavailable(
                f"s3: the store refuses {error.operation_name}: {_code(error)}"
            ) from None
        except Exception as error:  # noqa: BLE001 - botocore's parser raises what Python raises
            raise StorageUnavailable(
                f"s3: the store's answer can't be read: {type(error).__name__}"
            ) from None

    def _send(self, request: Any, **_: object) -> AWSResponse:
        """Send a request. botocore calls this function instead of its own."""
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
        call = self._send_signed(request.method, f"{url.path}?{url.query}", headers, body)
        (outcome,) = self._client.run([call], self._threads.deadline)
        if isinstance(outcome, CallFailed):
            raise outcome.error
        headers_read: Any = outcome.headers
        return AWSResponse(address, outcome.status, headers_read, _Body(outcome.body))

    def _send_signed(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Call[Reply]:
        target = target.removesuffix("?")
        answer = yield from self._client.send(
            lambda: self._client.prepared_request(method, target, headers, body)
        )
        return answer.reply


class _Body:
    """The part of urllib3's response that botocore reads."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body


def _status(error: botocore.exceptions.ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _code(error: botocore.exceptions.ClientError) -> str:
    return _error_name(str(error.response.get("Error", {}).get("Code", "")))


def _error_name(code: str) -> str:
    """Return an error's name, if the text looks like a name."""
    return code if _CODE.fullmatch(code) else "an error without a name"
