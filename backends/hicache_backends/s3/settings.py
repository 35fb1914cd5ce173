"""The config of `s3`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

from hicache_storage.settings import ByteSize, Field, PositiveSeconds, SecretStr, Settings

_PREFIX = re.compile(r"(?:[A-Za-z0-9_.~-]+/)*")
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]+")
_OWN_HEADERS = frozenset(
    {
        "authorization",
        "connection",
        "content-length",
        "expect",
        "host",
        "if-none-match",
        "range",
        "transfer-encoding",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
    }
)


def _prefix(text: str) -> str:
    """With a slash at its end, which makes it a folder of its own."""
    prefix = text if not text or text.endswith("/") else f"{text}/"
    if not _PREFIX.fullmatch(prefix) or any(part in (".", "..") for part in prefix.split("/")):
        raise ValueError("must be names of letters, digits and _.~- with single slashes between")
    return prefix


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    try:
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT], without credentials")
    return text.rstrip("/")


def _headers(given: dict[str, str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name.lower()) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is no header, or its value is none")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"{name!r} is set by the backend itself")
        headers[name.lower()] = " ".join(value.split())
    return headers


Headers = Annotated[dict[str, str], AfterValidator(_headers)]


class S3Settings(Settings):
    """The config of `s3`."""

    bucket: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]$")
    """A bucket's name, or the alias of an access point."""
    prefix: Annotated[str, AfterValidator(_prefix)] = ""
    """What every object's name begins with. Everything that shares bucket and prefix shares pages."""
    endpoint_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    """None: AWS, or what the environment and the AWS config files say."""
    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    """None: what the environment and the AWS config files say, else us-east-1."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name stands: in the path, or in the host's name."""
    create_bucket: bool = False
    """Make the bucket where it is missing."""

    profile: str | None = Field(default=None, min_length=1)
    """The profile of the AWS config files."""
    credentials_file: str | None = Field(default=None, min_length=1)
    """In the format of ~/.aws/credentials, and read in its place."""
    access_key_id: str | None = Field(default=None, min_length=1)
    """Better left to the environment, a file or a role: the standard chain finds it there."""
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    anonymous: bool = False
    """Sign nothing."""

    parallelism: int = Field(default=8, ge=1)
    """Concurrent calls that the page store makes in each direction."""
    fan_out: int = Field(default=8, ge=1, le=1024)
    """Requests of one call that are under way at once, each on a connection of its own."""
    timeout_s: PositiveSeconds = 10.0
    """The deadline of a call: name resolution, connecting and retries included."""
    stall_timeout_s: PositiveSeconds | None = None
    """A connection on which nothing moves for so long is given up. None: a third of `timeout_s`."""
    max_attempts: int = Field(default=3, ge=1)
    """How often one request is made, if the store or the network fails."""

    conditional_puts: bool = True
    """Ask the store to keep a page that is there, with If-None-Match."""
    head_first_nbytes: ByteSize = Field(default=1 << 20, ge=0)
    """Pages from this size on are looked up before they are sent."""
    checksum: Literal["none", "crc32"] = "none"
    """Have the store check what it takes, and check what it returns."""
    sign_payload: bool | None = None
    """Sign the SHA-256 of pages. None: only where the transport is neither TLS nor loopback."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Encryption by the store; None: the bucket's default."""
    sse_kms_key_id: str | None = Field(default=None, pattern=r"^[\x21-\x7e]+$")
    headers: Headers = Field(default_factory=dict[str, str])
    """Sent with every request."""
    put_headers: Headers = Field(default_factory=dict[str, str])
    """Sent with every page that is written: x-amz-storage-class, x-amz-tagging."""

    ca_file: str | None = Field(default=None, min_length=1)
    """Certificates to trust. None: AWS_CA_BUNDLE, else botocore's own."""
    tls_verify: bool = True
    """False: trust any certificate."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key: give both or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token: needs access_key_id and secret_access_key")
        if self.sse_kms_key_id is not None and not (self.sse or "").startswith("aws:kms"):
            raise ValueError('sse_kms_key_id: needs "sse": "aws:kms"')
        return self

    @property
    def stall_s(self) -> float:
        """After which silence a connection is given up."""
        return self.stall_timeout_s or self.timeout_s / 3

    @property
    def written_headers(self) -> dict[str, str]:
        """Headers of a request that writes a page, those of every request included."""
        found = {**self.headers, **self.put_headers}
        if self.sse is not None:
            found["x-amz-server-side-encryption"] = self.sse
        if self.sse_kms_key_id is not None:
            found["x-amz-server-side-encryption-aws-kms-key-id"] = self.sse_kms_key_id
        return found
