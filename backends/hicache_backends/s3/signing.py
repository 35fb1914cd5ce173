"""Heads of HTTP requests, signed with AWS Signature Version 4.

botocore signs as well, but takes ten times as long, which is the time to send a page of 64 KiB. It
also logs the session token. The tests compare every signature with botocore's.
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
EMPTY_SHA256 = hashlib.sha256().hexdigest()


class FrozenKeys(Protocol):
    """One pair of keys with an optional session token, as botocore's ReadOnlyCredentials."""

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
    """The parts that all signatures of one day share."""

    date: str
    secret_key: str
    scope: str
    key: bytes


class Signer:
    """Signs for one host and region. Thread-safe: its cached parts are replaced and never modified."""

    def __init__(self, host: str, region: str) -> None:
        self._host = host
        self._region = region
        self._day: _Day | None = None
        self._second = (0, "")

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
        """Return the head of a request with the blank line. Without `keys` it is not signed.

        `path` and `query` are escaped already; the names in `headers` are in lower case.
        """
        sent = {"host": self._host, **headers}
        if keys is not None:
            sent["x-amz-content-sha256"] = payload_sha256
            self._sign(f"{method}\n{path}\n{_canonical(query)}", sent, keys)
        if body_nbytes is not None:
            sent["content-length"] = str(body_nbytes)
        target = f"{path}?{query}" if query else path
        lines = "".join([f"{name}: {value}\r\n" for name, value in sent.items()])
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def _sign(self, target: str, sent: dict[str, str], keys: FrozenKeys) -> None:
        """Add a signature over `target` and all headers so far."""
        now = sent["x-amz-date"] = self._now()
        if keys.token:
            sent["x-amz-security-token"] = keys.token
        names = sorted(sent)
        signed = ";".join(names)
        lines = "".join([f"{name}:{sent[name]}\n" for name in names])
        request = f"{target}\n{lines}\n{signed}\n{sent['x-amz-content-sha256']}"
        digest = hashlib.sha256(request.encode("latin-1")).hexdigest()
        day = self._of_day(now[:8], keys.secret_key or "")
        text = f"AWS4-HMAC-SHA256\n{now}\n{day.scope}\n{digest}"
        signature = hmac.digest(day.key, text.encode(), "sha256").hex()
        sent["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{day.scope},"
            f" SignedHeaders={signed}, Signature={signature}"
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


def _canonical(query: str) -> str:
    """Return the parameters in order, each with an equals sign."""
    if not query:
        return ""
    parameters = sorted(part.partition("=")[::2] for part in query.split("&"))
    return "&".join(f"{name}={value}" for name, value in parameters)
