"""A replay by several tensor parallel ranks, each a process, which agree on every prefix.

Each rank has its heads of the model, its own L2, and its own connection to the same storage. The first
process to fail ends the run: ranks without one of them can agree on nothing.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicache_storage.controller import Channel, RanksLost
from hicache_storage.errors import ConfigError, HiCacheError
from hicache_storage.replay.pools import extent_of
from hicache_storage.replay.rank_report import combined
from hicache_storage.replay.relay import RankReporter, replayed_warning

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from hicache_storage.controller import Ranks
    from hicache_storage.replay.job import ReplayJob

# Longer than any request may take on the slowest rank; those who die are noticed at once.
_RANKS_TIMEOUT_S = 120.0
_POLL_S = 0.2
_END_TIMEOUT_S = 5.0
_PRELOADED = ["torch.distributed", "hicache_storage.replay.job"]


def check(piece: ReplayJob) -> None:
    """Refuse what cannot be run by several ranks, before any process is started.

    Raises:
        ConfigError: The storage is not shared, there is no torch, or the ranks cannot split the model.
        HiCacheError: From opening the storage.
    """
    size = piece.settings.topology.size
    if importlib.util.find_spec("torch") is None:
        raise ConfigError('--ranks needs torch: pip install "hicache-storage[torch]"')
    for pool in piece.settings.pools:
        piece.settings.topology.parts(extent_of(pool.shape))
    for choice in (piece.choice, piece.troubles.swap):
        if choice is None:
            continue
        with choice.open() as storage:
            if not storage.capabilities.shared:
                raise ConfigError(
                    f"--ranks {size}: pages of backend {choice.backend!r} cannot be seen by other"
                    " processes: choose one that they share, like 'file' or 'redis'"
                )


def play_ranks(
    piece: ReplayJob, *, stop: threading.Event, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Replay it by all ranks at once; their figures in one.

    Raises:
        ConfigError: As `check`.
        HiCacheError: A rank failed or died. All of them have ended then.
    """
    check(piece)
    with tempfile.TemporaryDirectory(prefix="hicache-ranks-") as scratch:
        meeting = f"file://{os.path.join(scratch, 'meeting')}"  # noqa: PTH118 - a URL
        with _processes(piece, meeting) as ranks:
            return combined(_figures(ranks, stop, progress))


@dataclass(slots=True)
class _Rank:
    """A rank's process, seen from the one that started it."""

    number: int
    process: BaseProcess
    connection: Connection
    figures: dict[str, Any] | None = None
    lost: str | None = None
    """How it says that another rank has gone."""

    def receive(self, progress: Callable[[int], None]) -> None:
        """Take one message of it, or the end of them."""
        try:
            kind, told = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_END_TIMEOUT_S)
            raise HiCacheError(f"rank {self.number} died{self._how()}: the run was ended") from None
        if kind == "figures":
            self.figures = told
        elif kind == "failed":
            raise HiCacheError(f"rank {self.number} failed: {told}")
        elif kind == "lost":
            self.lost = told
        elif kind == "warning":
            replayed_warning(self.number, told)
        elif self.number == 0:
            progress(told)

    def _how(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return "" if code is None else f" with exit code {code}"
        return f", killed by {signal.Signals(-code).name}"


@contextmanager
def _processes(piece: ReplayJob, meeting: str) -> Generator[list[_Rank], None, None]:
    """All ranks, started; none of them is left afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # torch takes seconds: once, not once a rank
    ranks: list[_Rank] = []
    try:
        for number in range(piece.settings.topology.size):
            ours, theirs = context.Pipe()
            own = replace(piece, settings=replace(piece.settings, rank=number))
            process = context.Process(
                target=_run, args=(own, meeting, theirs), name=f"rank-{number}", daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.terminate()
        for rank in ranks:
            rank.process.join(_END_TIMEOUT_S)
            rank.process.kill()
            rank.process.join()
            rank.connection.close()


def _figures(
    ranks: list[_Rank], stop: threading.Event, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """What each has to tell in the end. A rank that was lost is heard of by its own death, or not."""
    told = False
    until_s = math.inf
    while waiting := [rank for rank in ranks if rank.figures is None and rank.lost is None]:
        if stop.is_set() and not told:
            told = True
            for rank in waiting:
                with suppress(OSError):  # it has died, which is heard of next
                    rank.connection.send("stop")
        for connection in multiprocessing.connection.wait(
            [rank.connection for rank in waiting], _POLL_S
        ):
            next(rank for rank in waiting if rank.connection is connection).receive(progress)
        if until_s == math.inf and any(rank.lost for rank in ranks):
            until_s = time.monotonic() + _END_TIMEOUT_S
        if time.monotonic() > until_s:
            break
    lost = next((rank for rank in ranks if rank.lost), None)
    if lost is not None:
        raise HiCacheError(f"rank {lost.number} failed: {lost.lost}")
    return [rank.figures for rank in ranks if rank.figures is not None]


# --- in a rank's process ---------------------------------------------------------------------------


class _AgreedStop:
    """A stop that all ranks come to after the same request."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._told = threading.Event()

    def set(self) -> None:
        """This rank was told to stop."""
        self._told.set()

    def is_set(self) -> bool:
        """Whether any rank was. Every rank asks as often."""
        (going_on,) = self._ranks.all_reduce_min(Channel.RESULT, [not self._told.is_set()])
        return not going_on

    def wait(self, timeout_s: float) -> bool:
        """Until this rank is told, or the time is over."""
        return self._told.wait(timeout_s)


def _run(piece: ReplayJob, meeting: str, connection: Connection) -> None:
    """One rank's life."""
    from hicache_storage.controller.torch_consensus import TorchRanks  # noqa: PLC0415 - imports torch
    from hicache_storage.replay.job import play  # noqa: PLC0415 - its own process's

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to hear
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    relay = RankReporter(connection)
    settings = piece.settings
    try:
        ranks = TorchRanks.connect(
            meeting, rank=settings.rank, size=settings.topology.size, timeout_s=_RANKS_TIMEOUT_S
        )
        stop = _AgreedStop(ranks)
        listening = threading.Thread(target=_listen, args=(connection, stop), daemon=True)
        listening.start()
        with relay.warnings():
            figures = play(
                piece, stop=stop, progress=lambda done: relay.send("progress", done), ranks=ranks
            )
        ranks.close()
    except RanksLost as error:
        relay.send("lost", str(error))
    except Exception as error:  # noqa: BLE001 - the first process tells of it
        relay.send("failed", f"{error}" if isinstance(error, HiCacheError) else repr(error))
    else:
        relay.send("figures", figures)


def _listen(connection: Connection, stop: _AgreedStop) -> None:
    """Wait for the word to stop; without the process that would give it there is nothing left to do."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    stop.set()
