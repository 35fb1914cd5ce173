"""Build, sign and retry requests to one bucket."""

from __future__ import annotations

import random
import ssl
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hicache_backends.s3.addresses import Addresses, is_loopback
from hicache_backends.s3.connections import IdleConnections, Request
from hicache_backends.s3.exchange import Call, Exchange, Pause
from hicache_backends.s3.losses import CallFailed, Loss, ReplyLost
from hicache_backends.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Signer
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.revocable import RevokedError, for_each_piece
from hicache_storage.backend_support.tls_failures import tls_failure
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_backends.s3.access import Access, Target
    from hicache_backends.s3.credentials import CredentialCache
    from hicache_backends.s3.replies import Reply
    from hicache_backends.s3.settings import S3Settings
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
OVERLOADED = frozenset({429, 503})
FAULTS = frozenset({500, 502, 504})
_TRANSIENT_CODES = frozenset({"RequestTimeout", "BadDigest", "IncompleteBody"})
_GATEWAY_ERRORS = frozenset({502, 504})
"""After these statuses the store may still have the request, and execute it later."""
_REDIRECTS = frozenset({301, 302, 307, 308})
_TOKEN_CODES = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})

_DENIALS = {
    "InvalidAccessKeyId": "the store does not know the access key id: check where it comes from",
    "SignatureDoesNotMatch": "the secret access key is not that of the access key id",
    "AccessDenied": "the policy of these credentials must allow it: see docs/backends/s3.md",
    "RequestTimeTooSkewed": "synchronize the clock of this machine with NTP",
}


class Answer(NamedTuple):
    """The final reply to a request."""

    reply: Reply
    in_doubt: bool
    """True if an earlier attempt may also have taken effect, or may still do so."""
    was_repeated: bool = False
    """True if the server ended an idle connection after the request was sent.

    The server may have executed the request.
    """


class Client:
    """A client that builds requests and runs calls. Thread-safe."""

    def __init__(
        self,
        settings: S3Settings,
        target: Target,
        credentials: ForkLocal[CredentialCache],
        connections: ForkLocal[IdleConnections],
        counters: Counters,
        *,
        signs_payload: bool,
    ) -> None:
        self.target = target
        self.counters = counters
        self._settings = settings
        self._credentials = credentials
        self._signs_payload = signs_payload
        self._signer = Signer(target.authority, target.region)
        self._connections = connections

    def run(self, calls: Sequence[Call[T]], deadline: Deadline) -> list[T | CallFailed]:
        """Run the calls until they end, or until the deadline. Return their results.

        Raises:
            StorageClosed: The storage was closed.
            StorageUnavailable, StorageTimeout, ConfigError: There are no keys to sign with.
        """
        self._credentials.get().refresh(deadline)
        exchange = Exchange(
            self._connections.get(),
            deadline=deadline,
            fan_out=self._settings.fan_out,
            stall_s=self._settings.stall_s,
        )
        return exchange.run(calls)

    def close(self) -> None:
        """Let running calls end, and close all connections."""
        self._connections.get().close()

    def object_request(
        self,
        method: str,
        name: str,
        headers: Mapping[str, str],
        *,
        body: Page | None = None,
        into: Page | None = None,
        is_common: bool = True,
    ) -> Request:
        """Return a signed request for an object.

        `is_common`: many requests share this `headers` object, which must not change.

        Raises:
            RevokedError: The memory of `body` was revoked.
        """
        payload = EMPTY_SHA256 if body is None else UNSIGNED_PAYLOAD
        head_of = self._signer.common_head if is_common else self._signer.head
        if body is not None and self._signs_payload:
            payload, head_of = _sha256(body), self._signer.head
        head = head_of(
            method,
            f"{self.target.root}{name}",
            headers,
            keys=self._credentials.get().keys,
            payload_sha256=payload,
            body_nbytes=None if body is None else body.nbytes,
        )
        page = into or body
        return Request(
            head=head,
            body=() if body is None else body.segments,
            has_reply_body=method != "HEAD",
            into=() if into is None else into.segments,
            into_nbytes=0 if into is None else into.nbytes,
            revocable=None if page is None else page.revocable,
        )

    def prepared_request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> Request:
        """Sign a request that boto3 prepared."""
        path, _, query = url.partition("?")
        head = self._signer.head(
            method,
            path,
            headers,
            keys=self._credentials.get().keys,
            query=query,
            payload_sha256=sha256(body).hexdigest(),
            body_nbytes=len(body) if body or method in ("PUT", "POST") else None,
        )
        return Request(
            head=head, body=[memoryview(body)] if body else (), has_reply_body=method != "HEAD"
        )

    def send(self, make: Callable[[], Request]) -> Call[Answer]:
        """Return the answer to a request, after up to `max_attempts` attempts.

        The pauses between attempts have full jitter.

        Raises:
            CallFailed: No reply arrived.
            RevokedError: The memory of the page was revoked before the end of the first attempt.
        """
        in_doubt = False
        pause_s = 0.0
        was_repeated = False
        refused: ReplyLost | None = None
        last: Answer | CallFailed | None = None
        for attempt in range(1, self._settings.max_attempts + 1):
            is_last = attempt == self._settings.max_attempts
            try:
                if attempt > 1:
                    self.counters.add("retries")
                    yield Pause(random.uniform(0, pause_s))
                reply, was_sent_before = yield from self._send_once(make)
            except ReplyLost as lost:
                in_doubt = in_doubt or was_repeated or lost.was_sent
                self.counters.add(lost.loss.value)
                last = CallFailed(self._error_of(_reason(lost, refused)), in_doubt=in_doubt)
                if is_last or lost.loss is Loss.LATE:
                    raise last from None
                refused = lost if lost.loss is Loss.UNREACHABLE else None
                pause_s = _pause_s(attempt)
            except RevokedError:
                if isinstance(last, CallFailed):
                    raise last from None
                if last is None:
                    raise
                return last
            else:
                was_repeated = was_repeated or was_sent_before
                last = Answer(reply, in_doubt, was_repeated)
                if not self._is_transient(reply) or is_last:
                    return last
                in_doubt = in_doubt or reply.status in _GATEWAY_ERRORS
                pause_s = _pause_s(attempt) * (4 if reply.status in OVERLOADED else 1)
        raise AssertionError("max_attempts is at least 1")

    def refusal(self, reply: Reply) -> CallFailed:
        """Return the error for a reply that is neither a success nor a miss."""
        status, code = reply.status, reply.code
        shown = f"{status} {code}".strip()
        bucket = self._settings.bucket
        advice: str | None = ""  # most texts below say what to do
        if status in _REDIRECTS or code == "AuthorizationHeaderMalformed":
            self.counters.add("redirects")
            there = reply.headers.get("x-amz-bucket-region")
            remedy = f"set region to {there}" if there else "set region or endpoint_url"
            text = f"s3: bucket {bucket} is served elsewhere ({shown}): {remedy}"
        elif is_denied(status, code):
            self.counters.add("denied")
            self.invalidate_keys()
            text = f"s3: bucket {bucket} denies access ({shown}): {denial_advice(code)}"
        elif code == "NoSuchBucket":
            text = f"s3: bucket {bucket} is not there ({shown}): create it"
        else:
            text, advice = f"s3: the store of bucket {bucket} answers {shown}", None
            if status not in OVERLOADED | FAULTS:
                self.counters.add("refused")
        error = StorageUnavailable(text, advice=advice)
        return CallFailed(error, in_doubt=status in _GATEWAY_ERRORS)

    def invalidate_keys(self) -> None:
        """Fetch the credentials again, because the store denies access with the current ones."""
        self._credentials.get().invalidate()

    def _send_once(self, make: Callable[[], Request]) -> Call[tuple[Reply, bool]]:
        """Send a request. If the server had closed an idle connection, send the request again at once.

        Return the reply, and whether the whole request had been sent before. A `ReplyLost` records
        that, too.
        """
        was_sent_before = False
        stale: ReplyLost | None = None
        while True:
            try:
                reply = yield make()
            except ReplyLost as lost:
                was_sent_before = lost.was_sent = was_sent_before or lost.was_sent
                if not lost.is_stale:
                    raise
                stale = lost
                self.counters.add("reconnects")
            except RevokedError:
                if stale is None or not was_sent_before:
                    raise
                raise stale from None
            else:
                assert reply is not None
                return reply, was_sent_before

    def _is_transient(self, reply: Reply) -> bool:
        """Return True if another attempt may help, and count the reason."""
        if reply.status in OVERLOADED:
            self.counters.add("slow_downs")
        elif reply.status in FAULTS or (reply.status == 400 and reply.code in _TRANSIENT_CODES):
            self.counters.add("server_errors")
        elif reply.status == 409:
            self.counters.add("conflicts")
        else:
            return False
        return True

    def _error_of(self, lost: ReplyLost) -> HiCacheError:
        if lost.error is not None:
            return lost.error
        address = f"{self.target.host}:{self.target.port}"
        if isinstance(lost.__cause__, ssl.SSLError) and lost.loss is Loss.UNREACHABLE:
            failure = tls_failure(
                address, lost.__cause__, authority_field="ca_file", plain_scheme="http://"
            )
            return StorageUnavailable(f"s3: {failure}", advice=failure.advice)
        where = f"s3: {address}"
        if lost.loss in (Loss.LATE, Loss.STALLED):
            is_tls_doubtful = self.target.is_tls and not lost.was_sent
            hint = ". If it does not use TLS on this port, the scheme must be http://"
            return StorageTimeout(
                f"{where} did not answer: {lost}{hint if is_tls_doubtful else ''}"
            )
        if lost.loss is Loss.UNREACHABLE:
            return StorageUnavailable(f"{where} cannot be reached: {lost}")
        return StorageUnavailable(f"{where} broke the connection: {lost}")


def open_client(settings: S3Settings, access: Access, counters: Counters) -> Client:
    """Return a client for the target of `access`."""
    target = access.target
    tls = access.tls_context() if target.is_tls else None

    def connections() -> IdleConnections:
        most_idle = 2 * settings.parallelism * settings.fan_out
        addresses = Addresses(target.host, target.port)
        return IdleConnections(target.host, addresses, tls, most_idle=most_idle)

    is_transport_safe = target.is_tls or is_loopback(target.host)
    signs = settings.sign_payload
    return Client(
        settings,
        target,
        ForkLocal(access.credential_cache, close=lambda _: None),
        ForkLocal(connections, close=IdleConnections.close, abandon=IdleConnections.abandon),
        counters,
        signs_payload=not is_transport_safe if signs is None else signs,
    )


def denial_advice(code: str) -> str:
    """Return what to do about a denial. The answer to a HEAD has no code."""
    return _DENIALS.get(code, "check the credentials, their policy, and the clock")


def is_denied(status: int, code: str) -> bool:
    """Return True if other credentials might help."""
    return status in (401, 403) or code in _TOKEN_CODES


def _reason(lost: ReplyLost, refused: ReplyLost | None) -> ReplyLost:
    """Return the failure to report: a refused connection rather than a later attempt's timeout."""
    if lost.loss is Loss.LATE and not lost.was_sent and refused is not None:
        return refused
    return lost


def _pause_s(attempt: int) -> float:
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1))


def _sha256(body: Page) -> str:
    digest = sha256()
    for_each_piece(body, digest.update)
    return digest.hexdigest()
