"""The config of `s3`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

from hicache_storage.settings import (
    ByteSize,
    Field,
    FileName,
    PositiveSeconds,
    SecretStr,
    Settings,
)

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
    """Return the prefix with a slash at its end: without it, `kv` would also match `kv2`."""
    prefix = text if not text or text.endswith("/") else f"{text}/"
    if not _PREFIX.fullmatch(prefix) or any(part in (".", "..") for part in prefix.split("/")):
        raise ValueError(
            "must be names of letters, digits and _.~- with single slashes between them"
        )
    return prefix


def _endpoint(text: str) -> str:
    if not _is_endpoint(text):
        raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT], without credentials")
    return text.rstrip("/")


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)  # an error of Python's may repeat the text
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return right and not ("@" in parts.netloc or parts.query or parts.fragment)


def _headers(given: dict[str, str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name.lower()) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"{name!r} is not a valid header, or its value is not")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"{name!r} is set by the backend itself")
        headers[name.lower()] = " ".join(value.split())
    return headers


Headers = Annotated[dict[str, str], AfterValidator(_headers)]


class S3Settings(Settings):
    """The config of `s3`."""

    bucket: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]$",
        description="3 to 255 letters, digits, or characters of . _ -, the first and the last a letter"
        " or digit",
    )
    """A bucket's name, or the alias of an access point."""
    prefix: Annotated[str, AfterValidator(_prefix)] = ""
    """The beginning of every object's name. Programs with the same bucket and prefix share pages."""
    endpoint_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    """The address of the store.

    None: AWS, or the endpoint from the environment or the AWS config files.
    """
    region: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9-]+$", description="letters, digits and hyphens"
    )
    """The region. None: the region from the environment or the AWS config files, else us-east-1."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name goes: in the path, or in the host's name."""
    create_bucket: bool = False
    """Create the bucket if it is missing."""

    profile: str | None = Field(default=None, min_length=1)
    """A profile in the AWS config files."""
    credentials_file: str | None = Field(default=None, min_length=1)
    """The file to read instead of ~/.aws/credentials, in the format of that file."""
    access_key_id: str | None = Field(default=None, min_length=1)
    """An access key. The environment, a file or a role is a better place for it."""
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    anonymous: bool = False
    """Send requests without a signature."""

    parallelism: int = Field(default=8, ge=1)
    """Concurrent calls of the page store in each direction."""
    fan_out: int = Field(default=8, ge=1, le=1024)
    """Concurrent requests of one call, each on its own connection."""
    timeout_s: PositiveSeconds = 10.0
    """The time limit of a call, including name lookup, connecting and retries."""
    stall_timeout_s: PositiveSeconds | None = None
    """A connection is dropped after this time without progress. None: a third of `timeout_s`."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a request is attempted at most, if the store or the network fails."""

    conditional_puts: bool = True
    """Send If-None-Match with a put, so that the store keeps an existing page."""
    head_first_nbytes: ByteSize = Field(default=1 << 20, ge=0)
    """A page of at least this size is looked up before it is sent."""
    checksum: Literal["none", "crc32"] = "none"
    """The checksum that the store verifies on a put, and the backend on a get."""
    sign_payload: bool | None = None
    """Sign the SHA-256 of pages. None: only if the transport is neither TLS nor loopback."""
    sse: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Encryption by the store. None: the bucket's default."""
    sse_kms_key_id: str | None = Field(
        default=None, pattern=r"^[\x21-\x7e]+$", description="printable ASCII without spaces"
    )
    headers: Headers = Field(default_factory=dict[str, str])
    """Headers for every request."""
    put_headers: Headers = Field(default_factory=dict[str, str])
    """Headers for every put of a page, such as x-amz-storage-class and x-amz-tagging."""

    ca_file: FileName | None = Field(default=None, min_length=1)
    """A file with the certificates to trust. None: AWS_CA_BUNDLE, else botocore's own file."""
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
        """The time without progress after which a connection is dropped."""
        return self.stall_timeout_s or self.timeout_s / 3

    @property
    def write_headers(self) -> dict[str, str]:
        """The headers for a put of a page, including those for every request."""
        found = {**self.headers, **self.put_headers}
        if self.sse is not None:
            found["x-amz-server-side-encryption"] = self.sse
        if self.sse_kms_key_id is not None:
            found["x-amz-server-side-encryption-aws-kms-key-id"] = self.sse_kms_key_id
        return found
