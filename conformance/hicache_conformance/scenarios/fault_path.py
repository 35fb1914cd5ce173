"""The path from a store to its server, with a proxy in front of each address in the config."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.case.probe import Probe
from hicache_conformance.run.outcomes import NotVerified, Unknown, Violation
from hicache_conformance.scenarios.attempts import Attempt, Caller, error_text, make_attempt
from hicache_conformance.scenarios.setup import no_server
from hicache_conformance.tools.network.proxy import Endpoint, FaultProxy, endpoints_in, redirected
from hicache_conformance.tools.processes.descriptors import wait_writable
from hicache_storage.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_conformance.case.case import Case
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

TIMEOUT_S = 1.0
"""The value for `timeout_s` if the store has that field."""
GRACE_S = 1.75
"""How long a call may take beyond its timeout: the contract's second, and more on a busy machine."""
RECOVERY_LIMIT_S = 12.0
"""How long a store may keep a breaker open, or be late on a busy machine."""
_HANGS_AFTER_S = 4.0
"""How long to wait for a late call before it counts as hanging."""
_DEFAULT_TIMEOUT_S = 30.0
_LONGEST_TIMEOUT_S = 15.0
_MAX_WIDTH = 8
_CONNECT_WAIT_S = 0.2
"""If connecting to this machine takes longer than this, the connection waits in a queue."""
_ABSENT = "0" * 64
_PROBE_CALLS = 4
"""So many calls show whether a store uses its proxies: a heartbeat may disguise a single one."""
LEAST_NBYTES = len(_ABSENT) // 2
"""The fewest bytes that a call sends, because it names a page by at least a binary hash."""


@dataclass
class FaultPath:
    """A store whose network or server the kit can make fail, with pages of one key space."""

    case: Case
    config: dict[str, Any]
    timeout_s: float
    space: KeySpace
    proxies: list[FaultProxy] = field(default_factory=list[FaultProxy])

    @property
    def limit_s(self) -> float:
        """How long a call may take."""
        return self.timeout_s + GRACE_S

    @property
    def width(self) -> int:
        """How many simultaneous calls use every connection of the store."""
        return min(self.case.claims.parallelism, _MAX_WIDTH)

    def on_all(self, fault: Callable[[FaultProxy], object]) -> None:
        """Call `fault` with every proxy."""
        for proxy in self.proxies:
            fault(proxy)

    def bytes_moved(self) -> int:
        """Return how many bytes have passed all proxies, in both directions."""
        return sum(proxy.bytes_up + proxy.bytes_down for proxy in self.proxies)

    def turns(self) -> int:
        """Return how many round trips have begun over all proxies."""
        return sum(proxy.turns for proxy in self.proxies)

    def caller(self, label: str = "store") -> Caller:
        """Return a caller on a new handle that has opened the key space."""
        opened: list[HiCacheStorage] = []
        _retry(lambda: opened.append(self.case.open_storage(self.config)))
        caller = self.caller_of(opened[0], label)
        self.answer_of(caller.open_space)
        return caller

    def caller_of(self, storage: HiCacheStorage, label: str = "store") -> Caller:
        """Return a caller on a handle that has not opened the key space."""
        probe = Probe(storage, self.case.trace, label, absent=self.case.absent)
        return Caller(probe, self.space, self.limit_s + _HANGS_AFTER_S)

    def stored_pages(self, caller: Caller, count: int) -> dict[str, bytes]:
        """Store pages and return them. If possible, set them on another handle than `caller` uses."""
        pages = self.case.contents(self.space, self.case.hashes(count))
        writer = self.caller("writer") if self.case.claims.shared else caller
        for page_hash, data in pages.items():
            self.answer_of(partial(writer.set, {page_hash: data}))
        return pages

    def answer_of(self, call: Callable[[], Attempt]) -> Any:
        """Repeat a call that must succeed until it does, even on a busy machine. Return its answer."""
        until_s = time.monotonic() + RECOVERY_LIMIT_S
        while (attempt := call()).error is not None:
            if not attempt.failed_by_contract:
                raise foreign_exception(attempt, self.case.trace.sequence())
            if time.monotonic() > until_s:
                raise Unknown(f"{attempt.operation} fails though nothing is wrong: {attempt.text}")
        return attempt.answer

    def open_and_call(self, caller: Caller) -> Attempt:
        """Open one more handle and make a call, because a lazy store connects only then."""

        def call() -> list[bool]:
            with self.case.subject.storage_class.from_config(self.config) as storage:
                return storage.batch_exists(self.space, [_ABSENT])

        return make_attempt(
            caller.probe, "from_config", call, limit_s=caller.limit_s + self.timeout_s
        )


def foreign_exception(attempt: Attempt, sequence: Sequence[str]) -> Violation:
    """Return the violation for an exception that no store may raise, whatever its network does."""
    return Violation(
        f"{attempt.operation} raised {type(attempt.error).__name__}, a foreign exception",
        "StorageUnavailable or StorageTimeout: translated at the edge, `raise ... from error`",
        attempt.text,
        sequence,
    )


def must_not_be_foreign(path: FaultPath, attempt: Attempt) -> None:
    """Raise `Violation` if a call raised an exception that the contract does not allow."""
    if attempt.error is not None and not attempt.failed_by_contract:
        raise foreign_exception(attempt, path.case.trace.sequence(attempt.operation))


def must_end_in_time(
    path: FaultPath, attempt: Attempt, why: str, *, claim: str = "", hint: str = ""
) -> None:
    """Raise `Violation` if a call took too long or raised a foreign exception.

    `why` completes the message "took too long when". `claim` begins the message, and `hint`
    completes what was expected.
    """
    must_not_be_foreign(path, attempt)
    if attempt.own_s > path.limit_s:
        raise Violation(
            f"{claim}{attempt.operation} took too long when {why}",
            f"an end within timeout_s + 1 = {path.timeout_s + 1:g} s{hint}",
            f"{attempt.text} after {attempt.duration_text}",
            path.case.trace.sequence(attempt.operation),
        )


@contextmanager
def open_fault_path(
    case: Case, page_nbytes: int = 64 << 10, *, short_timeout: bool = True
) -> Generator[FaultPath, None, None]:
    """Open the case's store behind proxies that pass everything, by default with a short `timeout_s`.

    Raises:
        NotDeclared: The store has no server.
        NotVerified: The config names no address, or the store does not connect to a proxy there.
    """
    endpoints = endpoints_in(case.config)
    if not endpoints:
        missing = "the config names no address that a proxy could stand in front of"
        none_too = ", and there is no back door `server`"
        raise no_server(case, missing + ("" if case.subject.offers("server") else none_too))
    with ExitStack() as stack:
        proxies = {each: stack.enter_context(_proxy(each)) for each in endpoints}
        config = redirected(case.config, {each: proxy.address for each, proxy in proxies.items()})
        try:
            path = open_direct_path(case, config, page_nbytes, short_timeout=short_timeout)
            path.proxies.extend(proxies.values())
            _must_use_proxies(path)
        except (HiCacheError, Unknown) as error:
            raise NotVerified(f"the store does not open at a proxy: {error}") from error
        stack.callback(case.close_storages)  # Handles close while the proxies still run.
        stack.callback(path.on_all, FaultProxy.pass_through)
        yield path


def open_direct_path(
    case: Case, config: dict[str, Any], page_nbytes: int = 4 << 10, *, short_timeout: bool = True
) -> FaultPath:
    """Return the case's store without proxies, for servers that the kit may stop."""
    config, timeout_s = (
        _with_short_timeout(case, config) if short_timeout else (config, _DEFAULT_TIMEOUT_S)
    )
    page_nbytes = min(page_nbytes, case.claims.max_page_nbytes or page_nbytes)
    return FaultPath(case, config, timeout_s, case.space(page_nbytes))


def without_server(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config with an address where nobody listens, or None if it names no address."""
    endpoints = endpoints_in(config)
    if not endpoints:
        return None
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        address: tuple[str, int] = placeholder.getsockname()
    return redirected(config, dict.fromkeys(endpoints, address))


@contextmanager
def full_listener() -> Generator[tuple[str, int], None, None]:
    """Yield an address where connecting neither succeeds nor fails, because the queue is full.

    Raises:
        NotVerified: This system accepts more connections than the queue holds.
    """
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        for _ in range(_MAX_WIDTH):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
            if not wait_writable(waiting.fileno(), _CONNECT_WAIT_S):
                yield address
                return
        raise NotVerified("this system has no full queue of connections")


def _proxy(endpoint: Endpoint) -> FaultProxy:
    try:
        return FaultProxy((endpoint.host, endpoint.port))
    except OSError as error:
        raise NotVerified(f"no proxy can reach {endpoint.host}:{endpoint.port}: {error}") from error


def _with_short_timeout(case: Case, config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the config with a short `timeout_s`, and the timeout that its calls have."""
    short = {**config, "timeout_s": TIMEOUT_S}
    try:
        case.subject.storage_class.from_config(short).close()
    except ConfigError:
        timeout_s = float(config.get("timeout_s", _DEFAULT_TIMEOUT_S))
        if timeout_s > _LONGEST_TIMEOUT_S:
            raise NotVerified(
                f"the store refuses a `timeout_s` of {TIMEOUT_S:g} s, and its {timeout_s:g} s are too"
                " long to wait for"
            ) from None
        return config, timeout_s
    return short, TIMEOUT_S


def _must_use_proxies(path: FaultPath) -> None:
    """Raise `NotVerified` if the bytes of calls do not pass the proxies.

    The bytes of pages may take another path: some stores ask a server where a page is and fetch it
    elsewhere.
    """
    caller = path.caller()
    pages = path.stored_pages(caller, _PROBE_CALLS)
    for page_hash in pages:
        before = path.bytes_moved()
        path.answer_of(partial(caller.get, [page_hash]))
        if path.bytes_moved() - before < LEAST_NBYTES:
            raise NotVerified(
                "the store does not go through a proxy: it finds its server another way"
            )


def _retry(call: Callable[[], None]) -> None:
    """Repeat a call until it succeeds, because on a busy machine it may time out."""
    until_s = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        try:
            call()
        except ConfigError:
            raise
        except HiCacheError as error:
            if time.monotonic() > until_s:
                raise Unknown(f"the store does not open: {error_text(error)}") from error
        else:
            return
