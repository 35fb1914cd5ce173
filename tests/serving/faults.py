"""What can happen to a store while clients ask, and what every engine must do meanwhile.

    for fault in of("redis"):
        strike(fault, store, server, asked, stall_limit_s=5)

A fault strikes under eight clients and is mended while they go on. Each answer, before, meanwhile and
after, must be that of the engine without a store, none may fail, and none may take longer than the
deadlines allow. Pages must come from the store before the fault, and again after it.

`watch` does the same with a store that comes with an engine, and only notes what it saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from servers import wait_until
from serving.answers import CLIENTS, Asked, Comparison, Traffic
from serving.engine import EngineServer
from serving.record import note
from serving.stores import IN_DIRECTORY, WITH_SERVER, Store

_STAGE_LIMIT_S = 300.0
FOREIGN_LIMIT_S = 60.0
"""How long a fault of an engine's own store lasts at most, if the answers do not come."""
_FAULT_S = 6.0
"""How long a fault lasts at least: deadlines pass, breakers open, and late metrics arrive."""
_RECOVERY_LIMIT_S = 60.0
_LOOK_S = 0.2


def _nothing(_: Store) -> None:
    """Leave a store as it is."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a store, and how it is put right."""

    name: str
    stores: Sequence[str]
    strike: Callable[[Store], object]
    mend: Callable[[Store], object] = _nothing


STOPPED = Fault("its server is stopped, and goes on", WITH_SERVER, Store.pause, Store.resume)
KILLED = Fault(
    "its server is killed, and comes back empty", WITH_SERVER, Store.kill, Store.start_empty
)
FULL = Fault("it is full, and has room again", ("file", "redis"), Store.fill, Store.make_room)
FAULTS = (
    STOPPED,
    KILLED,
    FULL,
    Fault(
        "its directory is removed, and is there again",
        IN_DIRECTORY,
        Store.remove_directory,
        Store.make_directory,
    ),
    Fault("a bit of every page is flipped", (*IN_DIRECTORY, "redis", "s3"), Store.damage),
)


def of(store: str) -> Sequence[Fault]:
    """Return what can happen to a store of this name."""
    return [fault for fault in FAULTS if store in fault.stores]


@dataclass(frozen=True)
class Course:
    """What the clients saw of a fault."""

    seen: Comparison
    """All answers."""
    calm: Comparison
    """The answers before the fault, from the first that the store could give."""
    since: Comparison
    """The answers since the fault struck."""
    loaded_in_calm: int
    """How many tokens came from the store before the fault."""
    loads_again: bool
    """Whether pages came from the store again, soon after the fault was mended."""


def strike(
    fault: Fault,
    store: Store,
    server: EngineServer,
    asked: Asked,
    *,
    stall_limit_s: float,
) -> None:
    """Let a fault strike, and check that it costs no answer and little time.

    Args:
        fault: What happens.
        store: The store that it happens to. The server uses it.
        server: The server that the clients ask.
        asked: More prompts than the engine's own pools hold, so that their KV comes from the store.
        stall_limit_s: How much longer than the slowest answer in calm an answer may take.
    """
    course = watch(fault, store, server, asked)
    assert course.seen.is_equal, course
    assert course.since.slowest_s <= course.calm.slowest_s + stall_limit_s, course
    assert course.loaded_in_calm, "nothing came from the store before the fault"
    assert course.loads_again, course


def watch(
    fault: Fault,
    store: Store,
    server: EngineServer,
    asked: Asked,
    *,
    stage_limit_s: float = _STAGE_LIMIT_S,
) -> Course:
    """Let a fault strike under eight clients, and note what they saw. Judge nothing.

    The fault is mended after a round of the prompts, or after `stage_limit_s` if that comes first.
    """
    loaded = [server.loaded_tokens()]
    with Traffic(server.ask, asked) as traffic:
        _wait(traffic, 0, len(asked.prompts))
        computed = traffic.answered()
        _wait(traffic, computed, len(asked.prompts))
        calm = traffic.comparison(computed)
        struck, struck_s = traffic.answered(), time.monotonic()
        loaded.append(server.loaded_tokens())
        fault.strike(store)
        with suppress(TimeoutError):
            _wait(traffic, struck, len(asked.prompts), stage_limit_s)
        wait_until(lambda: time.monotonic() > struck_s + _FAULT_S, _STAGE_LIMIT_S)
        loaded.append(server.loaded_tokens())
        fault.mend(store)
        mended_s = time.monotonic()
        try:
            wait_until(lambda: _loads_again(server, loaded[-1]), _RECOVERY_LIMIT_S)
        except TimeoutError:
            recovery: float | str = f"not within {_RECOVERY_LIMIT_S:g}"
        else:
            recovery = round(time.monotonic() - mended_s, 1)
        with suppress(TimeoutError):
            _wait(traffic, traffic.answered(), len(asked.prompts), stage_limit_s)
    before, meanwhile = (int(end - start) for start, end in pairwise(loaded))
    seen, since = traffic.comparison(), traffic.comparison(struck)
    note(
        server.version,
        store.backend,
        f"{server.plug_point}{fault.name}",
        replace(seen, slowest_s=since.slowest_s),
        slowest_in_calm_s=round(calm.slowest_s, 2),
        loaded_in_calm=before,
        loaded_meanwhile=meanwhile,
        loads_again_after_s=recovery,
    )
    return Course(seen, calm, since, before, not isinstance(recovery, str))


def _loads_again(server: EngineServer, before: float) -> bool:
    """Return True if more has come from the store than `before`."""
    time.sleep(_LOOK_S)
    return server.loaded_tokens() > before


def _wait(traffic: Traffic, since: int, answers: int, limit_s: float = _STAGE_LIMIT_S) -> None:
    """Wait until so many answers have come that were asked after answer number `since`."""
    wait_until(lambda: traffic.answered() >= since + answers + CLIENTS, limit_s)
