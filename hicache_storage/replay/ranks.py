"""Run a replay with several tensor-parallel ranks, each a process. They agree on every prefix.

Each rank has its own heads of the model, its own L2 and its own connection to the same storage. If a
process fails, the run ends, because consensus needs every rank.
"""

from __future__ import annotations

import importlib.util
import logging
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
from hicache_storage.errors import ConfigError, HiCacheError, install_command
from hicache_storage.replay.driver import extent_of
from hicache_storage.replay.report import combine_ranks
from hicache_storage.replay.warning_log import warnings_to

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from hicache_storage.controller import Ranks
    from hicache_storage.replay.job import ReplayJob

# Longer than any request takes on the slowest rank. A dead rank is noticed at once.
_RANKS_TIMEOUT_S = 120.0
_POLL_S = 0.2
_END_TIMEOUT_S = 5.0
_PRELOADED = ["torch.distributed", "hicache_storage.replay.job"]


def check_job(job: ReplayJob) -> None:
    """Before any process starts, refuse a job that several ranks cannot run.

    Raises:
        ConfigError: The storage is not shared, torch is missing, or the model cannot be split by rank.
        HiCacheError: A storage could not be opened.
    """
    size = job.settings.topology.size
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--ranks needs torch: {install_command('torch')}")
    for pool in job.settings.pools:
        job.settings.topology.parts(extent_of(pool.shape))
    for choice in (job.choice, job.disruptions.swap):
        if choice is None:
            continue
        with choice.open() as storage:
            if not storage.capabilities.shared:
                raise ConfigError(
                    f"--ranks {size}: other processes cannot see the pages of"
                    f" backend {choice.backend!r}: choose a backend that they share, such as"
                    " 'file' or 'redis'"
                )


def run_ranks(
    job: ReplayJob, *, stop: threading.Event, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Run the replay on all ranks at once. Return their combined figures.

    Raises:
        ConfigError: As in `check_job`.
        HiCacheError: A rank failed or died. By then all ranks have ended.
    """
    check_job(job)
    with tempfile.TemporaryDirectory(prefix="hicache-ranks-") as scratch:
        rendezvous = f"file://{os.path.join(scratch, 'rendezvous')}"  # noqa: PTH118 - a URL
        with _processes(job, rendezvous) as ranks:
            return combine_ranks(_figures(ranks, stop, progress))


@dataclass(slots=True)
class _Rank:
    """A rank's process, seen from its parent."""

    number: int
    process: BaseProcess
    connection: Connection
    figures: dict[str, Any] | None = None
    lost: str | None = None
    """The rank's report that it has lost another rank."""

    def receive(self, progress: Callable[[int], None]) -> None:
        """Receive one message, or the end of the connection."""
        try:
            kind, payload = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_END_TIMEOUT_S)
            cause = self._cause_of_death()
            raise HiCacheError(f"rank {self.number} died{cause}: the run was ended") from None
        if kind == "figures":
            self.figures = payload
        elif kind == "failed":
            raise HiCacheError(f"rank {self.number} failed: {payload}")
        elif kind == "lost":
            self.lost = payload
        elif kind == "warning":
            name, level, text = payload
            logging.getLogger(name).log(level, f"rank {self.number}: {text}")  # noqa: G004 - filtered
        elif self.number == 0:
            progress(payload)

    def _cause_of_death(self) -> str:
        code = self.process.exitcode
        if code is None or code >= 0:
            return "" if code is None else f" with exit code {code}"
        return f", killed by {signal.Signals(-code).name}"


@contextmanager
def _processes(job: ReplayJob, rendezvous: str) -> Generator[list[_Rank], None, None]:
    """Start all ranks and yield them. End every rank afterwards."""
    context = multiprocessing.get_context("forkserver")
    # Importing torch takes seconds. The fork server imports it once for all ranks.
    context.set_forkserver_preload(_PRELOADED)
    ranks: list[_Rank] = []
    try:
        for number in range(job.settings.topology.size):
            ours, theirs = context.Pipe()
            rank_job = replace(job, settings=replace(job.settings, rank=number))
            process = context.Process(
                target=_run_rank,
                args=(rank_job, rendezvous, theirs),
                name=f"rank-{number}",
                daemon=True,
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
    """Return the final figures of every rank.

    A rank that reports a lost rank did not fail itself. The dead rank's own connection usually shows the
    cause, so the loop waits a little longer for it.
    """
    stop_sent = False
    until_s = math.inf
    while waiting := [rank for rank in ranks if rank.figures is None and rank.lost is None]:
        if stop.is_set() and not stop_sent:
            stop_sent = True
            for rank in waiting:
                with suppress(OSError):  # the rank has died, and `receive` reports it
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


class _CollectiveStop:
    """A stop signal that takes effect on all ranks after the same request."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._requested = threading.Event()

    def set(self) -> None:
        """Request a stop on this rank."""
        self._requested.set()

    def is_set(self) -> bool:
        """Return whether any rank was asked to stop. Every rank must call this equally often."""
        (go_on,) = self._ranks.all_reduce_min(Channel.RESULT, [not self._requested.is_set()])
        return not go_on

    def wait(self, timeout_s: float) -> bool:
        """Block until this rank is asked to stop, at most for `timeout_s`."""
        return self._requested.wait(timeout_s)


class RankReporter(logging.Handler):
    """A log handler that sends warnings and (kind, payload) messages to the parent. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._send_lock = threading.Lock()

    def send(self, kind: str, payload: Any) -> None:
        """Send a message. It is dropped if the parent has closed the connection."""
        with self._send_lock:
            try:
                self._connection.send((kind, payload))
            except OSError:  # the parent has ended the run
                return

    def emit(self, record: logging.LogRecord) -> None:
        self.send("warning", (record.name, record.levelno, record.getMessage()))


def _run_rank(job: ReplayJob, rendezvous: str, connection: Connection) -> None:
    """Run one rank's replay, and send the outcome to the parent."""
    from hicache_storage.controller.torch_consensus import TorchRanks  # noqa: PLC0415 - imports torch
    from hicache_storage.replay.job import run_job  # noqa: PLC0415 - only ranks run it

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reporter = RankReporter(connection)
    settings = job.settings
    try:
        ranks = TorchRanks.connect(
            rendezvous, rank=settings.rank, size=settings.topology.size, timeout_s=_RANKS_TIMEOUT_S
        )
        stop = _CollectiveStop(ranks)
        listener = threading.Thread(target=_listen, args=(connection, stop), daemon=True)
        listener.start()
        with warnings_to(reporter):
            figures = run_job(
                job, stop=stop, progress=lambda done: reporter.send("progress", done), ranks=ranks
            )
        ranks.close()
    except RanksLost as error:
        reporter.send("lost", str(error))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        reporter.send("failed", f"{error}" if isinstance(error, HiCacheError) else repr(error))
    else:
        reporter.send("figures", figures)


def _listen(connection: Connection, stop: _CollectiveStop) -> None:
    """Wait for the parent's stop message. Exit if the parent is gone."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    stop.set()
