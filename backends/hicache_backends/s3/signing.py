"""Build heads of HTTP requests, signed with AWS Signature Version 4.

botocore signs as well, but takes ten times as long, which is as long as sending a page of 64 KiB.
It also logs the session token. The tests compare every signature with botocore's.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
_CRLF = "\r\n"
EMPTY_SHA256 = hashlib.sha256().hexdigest()


class FrozenKeys(Protocol):
    """A pair of keys with an optional session token, like botocore's ReadOnlyCredentials."""

    @property
    def access_key(self) -> str | None: ...
    @property
    def secret_key(self) -> str | None: ...
    @property
    def token(self) -> str | None: ...


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Keys from the config."""

    access_key: str
    secret_key: str
    token: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class _Day:
    """What all signatures of one day have in common."""

    date: str
    secret_key: str
    scope: str
    key: bytes


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class _Template:
    """The parts of a head that do not depend on the path."""

    method: str
    headers: Mapping[str, str]
    keys: FrozenKeys | None
    now: str
    key: bytes = b""
    to_hash: str = ""
    """The end of the canonical request, after the path."""
    to_sign: str = ""
    """The beginning of the signed text, before the digest."""
    to_send: str
    """The head after the path, up to the signature."""

    def is_for(self, headers: Mapping[str, str], keys: FrozenKeys | None, now: str) -> bool:
        return self.headers is headers and self.keys is keys and (keys is None or self.now == now)

    def head(self, path: str, body_nbytes: int | None) -> bytes:
        length = "" if body_nbytes is None else f"content-length: {body_nbytes}\r\n"
        if self.keys is None:
            return f"{self.method} {path}{self.to_send}{length}\r\n".encode("latin-1")
        request = f"{self.method}\n{path}{self.to_hash}".encode("latin-1")
        text = f"{self.to_sign}{hashlib.sha256(request).hexdigest()}".encode()
        signature = hmac.digest(self.key, text, "sha256").hex()
        head = f"{self.method} {path}{self.to_send}{signature}\r\n{length}\r\n"
        return head.encode("latin-1")


class Signer:
    """A signer for one host and region. Thread-safe: cached parts are replaced and never modified."""

    def __init__(self, host: str, region: str) -> None:
        self._host = host
        self._region = region
        self._day: _Day | None = None
        self._second = (0, "")
        self._templates: dict[tuple[str, int, str], _Template] = {}

    def head(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        keys: FrozenKeys | None,
        query: str = "",
        payload_sha256: str = EMPTY_SHA256,
        body_nbytes: int | None = None,
    ) -> bytes:
        """Return the head of a request, including the blank line. Without `keys` it is not signed.

        `path` and `query` are already escaped; the names in `headers` are in lower case.
        """
        template = self._template(method, headers, keys, query, payload_sha256)
        return template.head(path, body_nbytes)

    def common_head(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        keys: FrozenKeys | None,
        payload_sha256: str,
        body_nbytes: int | None,
    ) -> bytes:
        """Do what `head` does, but faster, for a `headers` object that many requests share.

        `headers` is kept and must not change. Pass only a few different mappings and payloads,
        because their heads are cached.
        """
        key = (method, id(headers), payload_sha256)
        template = self._templates.get(key)
        if template is None or not template.is_for(headers, keys, self._now()):
            template = self._template(method, headers, keys, "", payload_sha256)
            self._templates[key] = template
        return template.head(path, body_nbytes)

    def _template(
        self,
        method: str,
        headers: Mapping[str, str],
        keys: FrozenKeys | None,
        query: str,
        payload_sha256: str,
    ) -> _Template:
        sent = {"host": self._host, **headers}
        version = f"?{query} HTTP/1.1\r\n" if query else " HTTP/1.1\r\n"
        if keys is None:
            head = f"{version}{_lines(sent, ': ', _CRLF)}"
            return _Template(method=method, headers=headers, keys=None, now="", to_send=head)
        sent["x-amz-content-sha256"] = payload_sha256
        now = sent["x-amz-date"] = self._now()
        if keys.token:
            sent["x-amz-security-token"] = keys.token
        canonical = {name: sent[name] for name in sorted(sent)}
        names = ";".join(canonical)
        lines = _lines(canonical, ":", "\n")
        day = self._of_day(now[:8], keys.secret_key or "")
        return _Template(
            method=method,
            headers=headers,
            keys=keys,
            now=now,
            key=day.key,
            to_hash=f"\n{_canonical(query)}\n{lines}\n{names}\n{payload_sha256}",
            to_sign=f"AWS4-HMAC-SHA256\n{now}\n{day.scope}\n",
            to_send=(
                f"{version}{_lines(sent, ': ', _CRLF)}"
                f"authorization: AWS4-HMAC-SHA256 Credential={keys.access_key}/{day.scope},"
                f" SignedHeaders={names}, Signature="
            ),
        )

    def _now(self) -> str:
        second = int(time.time())
        known, text = self._second
        if known != second:
            text = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
            self._second = (second, text)
        return text

    def _of_day(self, date: str, secret_key: str) -> _Day:
        day = self._day
        if day is None or day.date != date or day.secret_key != secret_key:
            key = f"AWS4{secret_key}".encode()
            for part in (date, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            day = self._day = _Day(date, secret_key, f"{date}/{self._region}/s3/aws4_request", key)
        return day


def _lines(headers: Mapping[str, str], separator: str, end: str) -> str:
    return "".join([f"{name}{separator}{value}{end}" for name, value in headers.items()])


def _canonical(query: str) -> str:
    """Return the parameters in alphabetical order, each with an equals sign."""
    if not query:
        return ""
    parameters = sorted(part.partition("=")[::2] for part in query.split("&"))
    return "&".join(f"{name}={value}" for name, value in parameters)
