"""The way from a store to its server, with a proxy in front of each address that the config names."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_conformance.case.probe import Probe
from hicache_conformance.run.outcomes import NotVerified, Unknown, Violation
from hicache_conformance.scenarios.attempts import Attempt, Caller, attempted, error_text
from hicache_conformance.tools.network.proxy import Endpoint, FaultProxy, endpoints_in, redirected
from hicache_storage.errors import ConfigError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_conformance.case.case import Case
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

TIMEOUT_S = 1.0
"""What `timeout_s` is set to, where the store has it."""
GRACE_S = 1.75
"""What a call may take beyond it: the second of the contract, and what a busy machine takes."""
PATIENCE_S = 12.0
"""For how long a store may have a breaker open, or be late on a busy machine, before it is given up."""
_HANGS_AFTER_S = 4.0
"""For how long a call that is too late is waited for, before it is said to hang."""
_DEFAULT_TIMEOUT_S = 30.0
_LONGEST_TIMEOUT_S = 15.0
_MAX_WIDTH = 8
_SETTLED_S = 0.2
"""On the way to this machine itself, what has not connected by then waits."""
_ABSENT = "0" * 64
_ASKED = 4
"""So many calls in a row do not all meet a heartbeat that goes the same way."""
LEAST_NBYTES = len(_ABSENT) // 2
"""That a call moves: it names a page, if only in binary."""


@dataclass
class FaultPath:
    """A store whose network or server the kit can make fail, and pages of one key space in it."""

    case: Case
    config: dict[str, Any]
    timeout_s: float
    space: KeySpace
    proxies: list[FaultProxy] = field(default_factory=list[FaultProxy])

    @property
    def limit_s(self) -> float:
        """In what time a call must come back."""
        return self.timeout_s + GRACE_S

    @property
    def width(self) -> int:
        """How many calls at once use every connection that the store keeps."""
        return min(self.case.claims.parallelism, _MAX_WIDTH)

    def all(self, fault: Callable[[FaultProxy], object]) -> None:
        """Do the same to every proxy."""
        for proxy in self.proxies:
            fault(proxy)

    def bytes_moved(self) -> int:
        """Through all proxies, in both directions."""
        return sum(proxy.bytes_up + proxy.bytes_down for proxy in self.proxies)

    def caller(self, label: str = "store") -> Caller:
        """The calls of a new handle, which has opened the key space."""
        opened: list[HiCacheStorage] = []
        _patiently(lambda: opened.append(self.case.open_storage(self.config)))
        caller = self.caller_of(opened[0], label)
        self.in_time(caller.open_space)
        return caller

    def caller_of(self, storage: HiCacheStorage, label: str = "store") -> Caller:
        """The calls of a handle, which has not opened the key space."""
        probe = Probe(storage, self.case.trace, label, absent=self.case.absent)
        return Caller(probe, self.space, self.limit_s + _HANGS_AFTER_S)

    def planted(self, caller: Caller, count: int) -> dict[str, bytes]:
        """Pages that are there and that `caller` has not seen, where another handle can set them."""
        pages = self.case.contents(self.space, self.case.hashes(count))
        writer = self.caller("writer") if self.case.claims.shared else caller
        for page_hash, data in pages.items():
            self.in_time(partial(writer.set, {page_hash: data}))
        return pages

    def in_time(self, call: Callable[[], Attempt]) -> Any:
        """The answer of a call that must succeed, and that a busy machine may make too late."""
        until_s = time.monotonic() + PATIENCE_S
        while (made := call()).error is not None:
            if not made.failed_by_contract:
                raise foreign(made, self.case.trace.sequence())
            if time.monotonic() > until_s:
                raise Unknown(f"{made.operation} fails though nothing is wrong: {made.text}")
        return made.answer

    def open_and_call(self, caller: Caller) -> Attempt:
        """Open one more handle and make a call: a lazy store connects only then."""

        def call() -> list[bool]:
            with self.case.subject.storage_class.from_config(self.config) as storage:
                return storage.batch_exists(self.space, [_ABSENT])

        return attempted(caller.probe, "from_config", call, limit_s=caller.limit_s + self.timeout_s)


def foreign(made: Attempt, sequence: Sequence[str]) -> Violation:
    """What to raise for an exception that no store may raise, whatever its network does."""
    return Violation(
        f"{made.operation} raised {type(made.error).__name__}, a foreign exception",
        "StorageUnavailable or StorageTimeout: translated at the edge, `raise ... from error`",
        made.text,
        sequence,
    )


@contextmanager
def road(
    case: Case, page_nbytes: int = 64 << 10, *, hurried: bool = True
) -> Generator[FaultPath, None, None]:
    """The case's store behind proxies. Nothing fails yet. `hurried`: with a short `timeout_s`.

    Raises:
        NotVerified: The config names no address, or the store does not go through a proxy there.
    """
    endpoints = endpoints_in(case.config)
    if not endpoints:
        missing = "the config names no address that a proxy could stand in front of"
        none_too = ", and there is no back door `server`"
        raise NotVerified(missing + ("" if case.subject.offers("server") else none_too))
    with ExitStack() as stack:
        proxies = {each: stack.enter_context(_proxy(each)) for each in endpoints}
        config = redirected(case.config, {each: proxy.address for each, proxy in proxies.items()})
        try:
            made = direct_road(case, config, page_nbytes, hurried=hurried)
            made.proxies.extend(proxies.values())
            _must_go_through(made)
        except (HiCacheError, Unknown) as error:
            raise NotVerified(f"the store does not open at a proxy: {error}") from error
        stack.callback(case.close_storages)  # while there is still a way to the server
        stack.callback(made.all, FaultProxy.pass_through)
        yield made


def direct_road(
    case: Case, config: dict[str, Any], page_nbytes: int = 4 << 10, *, hurried: bool = True
) -> FaultPath:
    """The same without proxies, for servers that the kit may stop."""
    config, timeout_s = _hurried(case, config) if hurried else (config, _DEFAULT_TIMEOUT_S)
    page_nbytes = min(page_nbytes, case.claims.max_page_nbytes or page_nbytes)
    return FaultPath(case, config, timeout_s, case.space(page_nbytes))


def without_server(config: dict[str, Any]) -> dict[str, Any] | None:
    """The config with an address where nobody listens; None where it names no address."""
    endpoints = endpoints_in(config)
    if not endpoints:
        return None
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        address: tuple[str, int] = placeholder.getsockname()
    return redirected(config, dict.fromkeys(endpoints, address))


@contextmanager
def nobody_accepts() -> Generator[tuple[str, int], None, None]:
    """An address where connecting neither succeeds nor fails: the queue of its listener is full.

    Raises:
        NotVerified: This system lets more in than a queue holds.
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
            if not select.select([], [waiting], [], _SETTLED_S)[1]:
                yield address
                return
        raise NotVerified("this system has no full queue of connections")


def _proxy(endpoint: Endpoint) -> FaultProxy:
    try:
        return FaultProxy((endpoint.host, endpoint.port))
    except OSError as error:
        raise NotVerified(f"no proxy can reach {endpoint.host}:{endpoint.port}: {error}") from error


def _hurried(case: Case, config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The config with a short `timeout_s`, and what its calls may take."""
    short = {**config, "timeout_s": TIMEOUT_S}
    try:
        case.subject.storage_class.from_config(short).close()
    except ConfigError:
        timeout_s = float(config.get("timeout_s", _DEFAULT_TIMEOUT_S))
        if timeout_s > _LONGEST_TIMEOUT_S:
            raise NotVerified(
                f"the store takes no `timeout_s` of {TIMEOUT_S:g} s, and its {timeout_s:g} s are too"
                " long to wait for"
            ) from None
        return config, timeout_s
    return short, TIMEOUT_S


def _must_go_through(made: FaultPath) -> None:
    """Bytes of every call must pass the proxies, or nothing is shown by what these do.

    Not those of pages: there are stores that ask a server where a page is, and fetch it elsewhere.
    """
    caller = made.caller()
    pages = made.planted(caller, _ASKED)
    for page_hash in pages:
        before = made.bytes_moved()
        made.in_time(partial(caller.get, [page_hash]))
        if made.bytes_moved() - before < LEAST_NBYTES:
            raise NotVerified(
                "the store does not go through a proxy: it finds its server another way"
            )


def _patiently(call: Callable[[], None]) -> None:
    """Make a call that a busy machine may make too late, until it is in time."""
    until_s = time.monotonic() + PATIENCE_S
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
