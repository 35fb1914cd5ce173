"""Actors that open, use and close a store in a process of their own, and report what it leaves.

In a busy process, other parts leave threads and descriptors too. In a fresh process, only the store
does.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any

from hicache_conformance.case.trace import Trace
from hicache_conformance.run.outcomes import NotVerified, Violation
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.tools.processes.child import Link
from hicache_conformance.tools.processes.resources import (
    ProcessResources,
    remaining_after,
    resident_nbytes,
)
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Child
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

GIVE_BACK_LIMIT_S = 10.0
_CLOSE_LIMIT_S = 20.0
_ANSWER_LIMIT_S = 240.0
_USERS = 3
_WARM_UP_ROUNDS = 2
"""Rounds before the count: when first used, libraries keep a descriptor or an event loop."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What rounds of open, use and close leave behind. A leak leaves something in each round."""

    rounds: int
    left: list[str]
    """The threads, descriptors and processes."""
    uncollected: int
    """How many closed storages something still refers to."""


def run_in_process(case: Case, actor: Callable[..., None], *arguments: Any) -> Any:
    """Run `actor` in a process of its own and return its result.

    If no other process can import the class, the actor runs in this process.
    """
    try:
        child = case.child(actor, *arguments)
    except NotVerified:
        return _run_locally(case, actor, *arguments)
    return receive_result(child)


def receive_result(child: Child) -> Any:
    """Return the next message of a process that uses a store.

    Raises:
        Violation: The process died.
    """
    try:
        return child.receive(_ANSWER_LIMIT_S)
    except EOFError:
        raise Violation(
            "a process that opened, used and closed the store died",
            "a store that leaves the process that uses it alive",
            f"its return code was {child.wait()}",
        ) from None


class _LocalLink(Link):
    """A link for an actor that runs in this process."""

    def __init__(self, case: Case) -> None:
        self._parent_end, child_end = Pipe()
        super().__init__(child_end, None, case.config, case.absent)
        self._case = case

    def open_storage(self) -> HiCacheStorage:
        return self._case.subject.storage_class.from_config(self.config)

    def result(self) -> Any:
        with self._parent_end, self.connection:
            return self._parent_end.recv()


def _run_locally(case: Case, actor: Callable[..., None], *arguments: Any) -> Any:
    link = _LocalLink(case)
    try:
        actor(link, *arguments)
    except BaseException:
        link.send(None)
        link.result()
        raise
    return link.result()


def small_space(case: Case) -> KeySpace:
    """Return a key space of pages that fit into any store."""
    return case.space(min(4096, case.claims.max_page_nbytes or 4096))


def use(probe: Probe, space: KeySpace, pages: int = 3, *, tag: str = "") -> None:
    """Call every method of daily use, with pages that are deleted afterwards."""
    hashes = [f"{number:08x}{os.getpid():024x}{_digits(tag):032x}" for number in range(pages)]
    probe.open_space(space)
    probe.set(space, {one: random.Random(one).randbytes(space.stored_nbytes) for one in hashes})
    probe.exists(space, hashes)
    probe.get(space, hashes)
    probe.storage.stats()
    if probe.storage.capabilities.enumerable:
        probe.scan(space)
        probe.spaces()
    if "batch_delete" not in probe.absent:
        probe.delete(space, hashes)


def leftovers(link: Link, space: KeySpace, temporary: str | None) -> None:
    """Actor: send what is left of a storage that several threads used, and of one that was not used."""
    if temporary is not None and not isinstance(link, _LocalLink):
        tempfile.tempdir = os.environ["TMPDIR"] = temporary
    with ThreadPoolExecutor(_USERS) as users:
        for _ in range(_WARM_UP_ROUNDS):
            _use_from_threads(link, space, users)
            _close(link.open())
        earlier = ProcessResources.current()
        # The handle is not collected, so only close can have released its resources.
        kept = [_use_from_threads(link, space, users)]
        used = remaining_after(earlier, GIVE_BACK_LIMIT_S)
        kept.append(_close(link.open()))
        unused = remaining_after(earlier, GIVE_BACK_LIMIT_S) if not used else []
        assert kept
    link.send((used, unused))


def growth(link: Link, space: KeySpace, rounds: int) -> None:
    """Actor: send what `rounds` rounds leave. If rounds seem to leak, make as many again."""
    for _ in range(_WARM_UP_ROUNDS):
        _round(link, space)
    earlier = ProcessResources.current()
    stores: list[weakref.ref[HiCacheStorage]] = []
    for doubled in (1, 2):
        stores += [weakref.ref(_round(link, space)) for _ in range(rounds)]
        left = remaining_after(earlier, GIVE_BACK_LIMIT_S / 2)
        uncollected = sum(one() is not None for one in stores)
        if max(len(left), uncollected) < doubled * rounds // 2:
            break
    link.send(Growth(len(stores), left, uncollected))


def failures(link: Link, wrong_configs: Sequence[dict[str, Any]], rounds: int) -> None:
    """Actor: send what `rounds` attempts to open the store with each wrong config leave."""
    for config in wrong_configs:
        _fail_to_open(link, config)
    earlier = ProcessResources.current()
    for config in wrong_configs:
        for _ in range(rounds):
            _fail_to_open(link, config)
    link.send(remaining_after(earlier, GIVE_BACK_LIMIT_S))


def failing_calls(link: Link, space: KeySpace, rounds: int) -> None:
    """Actor: let calls of each kind fail `rounds` times between two messages of the parent.

    Send what they leave.
    """
    probe = link.open()
    use(probe, space)
    use(probe, space)
    earlier = ProcessResources.current()
    link.send("ready")
    link.receive()
    storage, hashes = probe.storage, ["0" * 64]
    memory = probe.memory(space, 1)
    for call in (
        partial(storage.batch_exists, space, hashes),
        partial(storage.batch_get, space, hashes, memory.pages),
        partial(storage.batch_set, space, hashes, memory.pages),
        partial(storage.batch_delete, space, hashes),
    ):
        for _ in range(rounds):
            with suppress(HiCacheError):
                call()
    link.send("failed")
    link.receive()
    link.send(remaining_after(earlier, GIVE_BACK_LIMIT_S))


def _fail_to_open(link: Link, config: dict[str, Any]) -> None:
    right, link.config = link.config, config
    with suppress(HiCacheError):
        link.open_storage().close()
    link.config = right


def memory(link: Link, space: KeySpace, pages: int, rounds: int) -> None:
    """Actor: send the resident memory after each round."""
    samples: list[int] = []
    for _ in range(rounds):
        link.trace = Trace()  # the kit's own notes on all rounds would grow
        _round(link, space, pages)
        samples.append(resident_nbytes())
    link.send(samples)


def _round(link: Link, space: KeySpace, pages: int = 3) -> HiCacheStorage:
    probe = link.open()
    use(probe, space, pages)
    return _close(probe).storage


def _use_from_threads(link: Link, space: KeySpace, users: ThreadPoolExecutor) -> Probe:
    """Use the store from threads that live on, so that what it keeps for each thread shows."""
    probe = link.open()
    met = threading.Barrier(_USERS)

    def one(number: int) -> None:
        met.wait(GIVE_BACK_LIMIT_S)
        use(probe, space, tag=str(number))

    list(users.map(one, range(_USERS)))
    use(probe, space, tag="main")
    return _close(probe)


def _close(probe: Probe) -> Probe:
    done = make_attempt(probe, "close", probe.storage.close, limit_s=_CLOSE_LIMIT_S)
    if done.error is not None or done.own_s > GIVE_BACK_LIMIT_S:
        raise probe.violation(
            "close failed" if done.error else "close took longer than 10 s",
            got=f"{done.text} after {done.duration_text}",
        )
    return probe


def _digits(tag: str) -> int:
    return int.from_bytes(tag.encode(), "big")
