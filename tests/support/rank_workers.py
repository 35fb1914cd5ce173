"""Ranks as real processes: executors with one process each, forked from a server with torch loaded."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hicache_storage.controller import Channel
from hicache_storage.controller.torch_consensus import TorchRanks

_numbers = itertools.count()
_PRELOADED = ["torch.distributed", "hicache_storage.replay.job", "hicache_backends.file"]


class RankProcess:
    """One rank: a process that runs functions, one after another."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor
        self.pid = executor.submit(os.getpid).result()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function of an importable module in the process."""
        return self._executor.submit(function, *arguments)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)


@contextmanager
def rank_processes(count: int) -> Generator[list[RankProcess], None, None]:
    """Yield processes, and end them afterwards, whatever state they are in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with ExitStack() as stack:
        ranks: list[RankProcess] = []
        for _ in range(count):
            executor = ProcessPoolExecutor(1, mp_context=context)
            stack.callback(executor.shutdown, wait=True, cancel_futures=True)
            ranks.append(RankProcess(executor))
            stack.callback(_end, ranks[-1])
        yield ranks


def _end(rank: RankProcess) -> None:
    for number in (signal.SIGCONT, signal.SIGKILL):
        try:
            rank.signal(number)
        except ProcessLookupError:
            return


def connect_all(
    ranks: Sequence[RankProcess], scratch: Path, *, timeout_s: float, method: str = "connect"
) -> None:
    """Connect the ranks at a new place under `scratch`."""
    place = str(scratch / f"ranks-{next(_numbers)}")
    if method == "tcp":
        from servers import free_port

        place = f"tcp://127.0.0.1:{free_port()}"
    joining = [
        process.submit(join, place, rank, len(ranks), timeout_s, method)
        for rank, process in enumerate(ranks)
    ]
    for future in joining:
        future.result()


# --- functions that a rank's process runs ---------------------------------------------------------

_joined: list[TorchRanks] = []
_sockets_before: list[int] = []


def join(place: str, rank: int, size: int, timeout_s: float, method: str = "connect") -> None:
    """Connect to the other ranks, after closing earlier connections."""
    while _joined:
        _joined.pop().close()
    _sockets_before[:] = [_open_sockets()]
    _joined[:] = [connect(place, rank, size, timeout_s, method)]


def connect(
    place: str, rank: int, size: int, timeout_s: float, method: str = "connect"
) -> TorchRanks:
    """Connect this process to the other ranks, by a store or by an existing process group."""
    import torch.distributed as dist

    from hicache_storage.controller.torch_consensus import TorchRanks

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if method != "process group":
        url = place if method == "tcp" else f"file://{place}"
        return TorchRanks.connect(url, rank=rank, size=size, timeout_s=timeout_s)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size)
    return TorchRanks.from_process_group(timeout_s=timeout_s)


def all_reduce_min(channel: Channel, values: list[int]) -> list[int]:
    """Return the minimum over all ranks of each value."""
    return _joined[0].all_reduce_min(channel, values)


def both_channels(first: Channel, second: Channel) -> list[list[int]]:
    """Return the minima on two channels, each in its own thread."""
    answers: dict[Channel, list[int]] = {}

    def ask(channel: Channel, value: int) -> None:
        answers[channel] = _joined[0].all_reduce_min(channel, [value])

    threads = [
        threading.Thread(target=ask, args=(first, 1)),
        threading.Thread(target=ask, args=(second, 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[first], answers[second]]


def in_turn(*channels: Channel) -> list[list[int]]:
    """Return the minima on one channel after another."""
    return [_joined[0].all_reduce_min(channel, [number]) for number, channel in enumerate(channels)]


def agreed_pages(request_id: str, first: Channel, *others: Channel) -> list[int]:
    """Return the pages that the ranks agree on, on each channel, each in its own thread."""
    from engines import cache_pools

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.consensus import Consensus
    from hicache_storage.controller.pools import PoolSet
    from hicache_storage.controller.ranks import Topic

    consensus = Consensus(_joined[0], Counters(), PoolSet(cache_pools()))
    topic = Topic.of_request(request_id, [])
    pages: list[int] = []

    def ask(channel: Channel) -> None:
        agreed, _ = consensus.agree_prefix(channel, topic, [True, True])
        pages.append(agreed.pages)

    threads = [threading.Thread(target=ask, args=(channel,)) for channel in (first, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pages


def serve_with_losses(requests: int) -> list[Any]:
    """Return the facts of this rank's leases while its store loses pages."""
    import rank_losses

    return rank_losses.serve_with_losses(_joined[0].rank, _joined[0], requests)


def connections_after_loss() -> int:
    """Return how many sockets of the rank's groups are open while it handles the loss of a rank."""
    from hicache_storage.controller import Channel, RanksLost

    try:
        _joined[0].all_reduce_min(Channel.MATCH, [1])
    except RanksLost:
        return _open_sockets() - _sockets_before[0]
    return -1


def _open_sockets() -> int:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("socket:" in str(link.readlink()) for link in links)


def close() -> None:
    """Close the ranks twice."""
    _joined[0].close()
    _joined[0].close()


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return _joined[0].rank, _joined[0].size
