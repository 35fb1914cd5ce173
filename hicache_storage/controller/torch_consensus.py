"""Ranks that agree through torch.distributed: on the CPU, one gloo group a channel.

Seen with torch 2.13: a collective ends at once with an error where a peer's process is gone, and after
its timeout where a peer is stopped; the group is out of step from then on. Tensors of different sizes
end the process (gloo throws on a thread of its own), so no rank ever sends what another does not expect:
all calls begin with a collective of one fixed size, which says how much is to follow.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.controller.ranks import Channel, RanksLost
from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

_HEAD_WORDS = 512
_HEAD_VALUES = _HEAD_WORDS - 2
_TIMEOUT_S = 60.0


class TorchRanks:
    """The ranks of one engine, one process each. Each channel may be used by one thread at a time.

    Values are signed integers of 64 bits. `timeout_s` is how long a rank waits for the slowest of the
    others, storage calls included: more than the page store's own `timeout_s`. Who is lost once is lost
    for ever, here and, within `timeout_s`, on every rank; then only `close` is left to do.
    """

    def __init__(
        self,
        groups: Mapping[Channel, Any],
        *,
        rank: int,
        size: int,
        leave: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Use `connect` or `beside`."""
        self._torch = load_torch()
        self._groups = dict(groups)
        self._leave = leave
        self._lost = ""
        self.rank = rank
        self.size = size

    @classmethod
    def connect(cls, url: str, *, rank: int, size: int, timeout_s: float = _TIMEOUT_S) -> Self:
        """Meet the other ranks at `tcp://HOST:PORT`, where rank 0 listens, or at a fresh `file://PATH`.

        They reach each other by the address of their host name, or of the network interface that the
        environment names in GLOO_SOCKET_IFNAME.

        Raises:
            RanksLost: Not all came within `timeout_s`.
            ImportError: There is no torch.
        """
        distributed = load_torch().distributed
        timeout = timedelta(seconds=timeout_s)
        groups: dict[Channel, Any] = {}
        try:
            store, _, _ = next(distributed.rendezvous(url, rank, size, timeout=timeout))
            store.set_timeout(timeout)
            for channel in Channel:
                meeting = distributed.PrefixStore(f"hicache-{channel.value}", store)
                groups[channel] = distributed.ProcessGroupGloo(meeting, rank, size, timeout)
        except RuntimeError as error:
            raise RanksLost(
                f"rank {rank} did not meet all {size} ranks within {timeout_s} s: {_brief(error)}"
            ) from error
        return cls(groups, rank=rank, size=size)

    @classmethod
    def from_process_group(
        cls, group: ProcessGroup | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> Self:
        """The ranks of an engine's process group, in groups of their own; None: of all its processes.

        Called by all ranks of it at the same time.

        Raises:
            RanksLost: Not all came within `timeout_s`.
            ImportError: There is no torch.
        """
        distributed = load_torch().distributed
        members = distributed.get_process_group_ranks(group)
        rank = distributed.get_rank(group)
        groups: dict[Channel, Any] = {}
        try:
            for channel in Channel:
                groups[channel] = distributed.new_group(
                    members,
                    timeout=timedelta(seconds=timeout_s),
                    backend="gloo",
                    use_local_synchronization=True,
                    group_desc=f"hicache-{channel.value}",
                )
        except RuntimeError as error:
            raise RanksLost(
                f"rank {rank} did not meet all {len(members)} ranks within {timeout_s} s:"
                f" {_brief(error)}"
            ) from error

        def leave(left: Any) -> None:
            if distributed.is_initialized():  # else the engine has ended all groups before
                distributed.destroy_process_group(left)

        return cls(groups, rank=rank, size=len(members), leave=leave)

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """The smallest of all ranks' answers, one by one. Blocks until all have answered.

        Raises:
            RanksLost: A rank has gone, did not answer in time or asked for another number of values,
                now or before; or this was closed.
        """
        try:
            agreed = self._agree(channel, list(values))
        except RuntimeError as error:
            # Frames that know the group would keep its sockets open, and others waiting for this rank.
            cause = error.with_traceback(None)
            raise RanksLost(self._give_up(f"{channel.value}: {_brief(error)}")) from cause
        if agreed is None:
            raise RanksLost(
                self._give_up(f"{channel.value}: not all ranks asked the same question")
            )
        return agreed

    def close(self) -> None:
        """Let go of the other ranks, at once. Those who wait for this one see that it has gone.

        Idempotent. A call that is waiting in another thread ends by its own timeout.
        """
        self._let_go(f"rank {self.rank} has closed its connections")

    def _agree(self, channel: Channel, values: list[int]) -> list[int] | None:
        """What all ranks have in common; None where they did not send as many values."""
        group = self._groups.get(channel)
        if group is None:
            raise RanksLost(self._lost)
        head, rest = values[:_HEAD_VALUES], values[_HEAD_VALUES:]
        padding = [0] * (_HEAD_VALUES - len(head))
        least, minus_most, *agreed = self._reduce(
            group, [len(values), -len(values), *head, *padding]
        )
        if least != -minus_most:
            return None
        return agreed[: len(head)] + (self._reduce(group, rest) if rest else [])

    def _reduce(self, group: Any, words: list[int]) -> list[int]:
        tensor = self._torch.tensor(words, dtype=self._torch.int64)
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = self._torch.distributed.ReduceOp.MIN
        group.allreduce([tensor], options).wait()
        reduced: list[int] = tensor.tolist()
        return reduced

    def _give_up(self, reason: str) -> str:
        self._let_go(
            f"rank {self.rank} lost the other {self.size - 1}, on channel {reason}; they can agree on"
            " nothing any more: restart the engine"
        )
        return self._lost

    def _let_go(self, reason: str) -> None:
        """Close this end of every group, so that nobody waits for this rank."""
        self._lost = self._lost or reason
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._leave(group)


def _brief(error: Exception) -> str:
    """Gloo's own words, without its source file and its advice."""
    text = str(error).partition("] ")[2] or str(error)
    return text.partition(". ")[0].partition("\n")[0]
