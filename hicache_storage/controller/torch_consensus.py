"""Ranks over torch.distributed: one gloo group for each channel, on the CPU.

With torch 2.13, a collective fails at once if the process of a peer has ended, and after its timeout if
a peer does not answer. The group cannot be used from then on. Tensors of different sizes crash the
process, because gloo throws on a thread of its own. Therefore each call begins with a collective of
fixed size, which carries the number of values.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.controller.ranks import Channel, RanksLost
from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch.distributed import ProcessGroup

_HEAD_WORDS = 512
_HEAD_VALUES = _HEAD_WORDS - 2
_TIMEOUT_S = 60.0


class TorchRanks:
    """The ranks of one engine, one process each. Only one thread at a time may use a channel.

    Values are signed 64-bit integers. `timeout_s` is the longest wait for the slowest rank, storage
    calls included, so it must be longer than the page store's `timeout_s`. A lost rank stays lost: this
    rank raises RanksLost at once from then on, and every other rank within `timeout_s`. You can only
    call `close` then.
    """

    def __init__(
        self,
        groups: Mapping[Channel, Any],
        *,
        rank: int,
        size: int,
        leave: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Use `groups`. Call `connect` or `from_process_group` instead, which make the groups."""
        self._torch = load_torch()
        self._groups = dict(groups)
        self._leave = leave
        self._lost = ""
        self.rank = rank
        self.size = size

    @classmethod
    def connect(cls, url: str, *, rank: int, size: int, timeout_s: float = _TIMEOUT_S) -> Self:
        """Connect to the other ranks at `tcp://HOST:PORT`, where rank 0 listens, or at `file://PATH`.

        The file must be new. Ranks use the address of their host name. Set the environment variable
        GLOO_SOCKET_IFNAME to use the address of a network interface instead.

        Raises:
            RanksLost: A rank did not connect within `timeout_s`.
            ImportError: torch is not installed.
        """
        distributed = load_torch().distributed
        timeout = timedelta(seconds=timeout_s)
        groups: dict[Channel, Any] = {}
        with _connecting(rank, size, timeout_s):
            store, _, _ = next(distributed.rendezvous(url, rank, size, timeout=timeout))
            store.set_timeout(timeout)
            for channel in Channel:
                prefixed = distributed.PrefixStore(f"hicache-{channel.value}", store)
                groups[channel] = distributed.ProcessGroupGloo(prefixed, rank, size, timeout)
        return cls(groups, rank=rank, size=size)

    @classmethod
    def from_process_group(
        cls, group: ProcessGroup | None = None, *, timeout_s: float = _TIMEOUT_S
    ) -> Self:
        """Make new groups from an engine's process group. None stands for all processes.

        Call it on all ranks of the group at the same time.

        Raises:
            RanksLost: A rank did not connect within `timeout_s`.
            ImportError: torch is not installed.
        """
        distributed = load_torch().distributed
        members = distributed.get_process_group_ranks(group)
        rank = distributed.get_rank(group)
        groups: dict[Channel, Any] = {}
        with _connecting(rank, len(members), timeout_s):
            for channel in Channel:
                groups[channel] = distributed.new_group(
                    members,
                    timeout=timedelta(seconds=timeout_s),
                    backend="gloo",
                    use_local_synchronization=True,
                    group_desc=f"hicache-{channel.value}",
                )

        def leave(channel_group: Any) -> None:
            if distributed.is_initialized():  # else the engine has already destroyed all groups
                distributed.destroy_process_group(channel_group)

        return cls(groups, rank=rank, size=len(members), leave=leave)

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """Return the minimum of each value over all ranks. Block until all ranks have answered.

        Raises:
            RanksLost: A rank has ended, did not answer in time, or sent another number of values, in
                this call or an earlier one; or these ranks were closed.
        """
        try:
            minimum = self._minimum(channel, list(values))
        except RuntimeError as error:
            # Stack frames that refer to the group would keep its sockets open, and other ranks waiting.
            cause = error.with_traceback(None)
            raise RanksLost(self._lose(f"{channel.value}: {_gloo_message(error)}")) from cause
        if minimum is None:
            raise RanksLost(
                self._lose(f"{channel.value}: the ranks did not ask for the same agreement")
            )
        return minimum

    def close(self) -> None:
        """Leave the other ranks at once. A rank that waits for this one gets an error. Idempotent.

        A call that waits in another thread ends by its own timeout.
        """
        self._leave_groups(f"rank {self.rank} has closed its connections")

    def _minimum(self, channel: Channel, values: list[int]) -> list[int] | None:
        """Return the minimum of each value, or None if the ranks sent different numbers of values."""
        group = self._groups.get(channel)
        if group is None:
            raise RanksLost(self._lost)
        head, rest = values[:_HEAD_VALUES], values[_HEAD_VALUES:]
        padding = [0] * (_HEAD_VALUES - len(head))
        least, minus_most, *minimum = self._reduce(
            group, [len(values), -len(values), *head, *padding]
        )
        if least != -minus_most:
            return None
        return minimum[: len(head)] + (self._reduce(group, rest) if rest else [])

    def _reduce(self, group: Any, words: list[int]) -> list[int]:
        tensor = self._torch.tensor(words, dtype=self._torch.int64)
        options = self._torch.distributed.AllreduceOptions()
        options.reduceOp = self._torch.distributed.ReduceOp.MIN
        group.allreduce([tensor], options).wait()
        reduced: list[int] = tensor.tolist()
        return reduced

    def _lose(self, reason: str) -> str:
        self._leave_groups(
            f"rank {self.rank} lost the other {self.size - 1} on channel {reason}; the ranks can"
            " no longer agree: restart the engine"
        )
        return self._lost

    def _leave_groups(self, reason: str) -> None:
        """Leave every group, so that no rank waits for this one. Keep the reason of the first call."""
        self._lost = self._lost or reason
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._leave(group)


@contextmanager
def _connecting(rank: int, size: int, timeout_s: float) -> Generator[None]:
    """Raise RanksLost if connecting fails in the `with` block."""
    try:
        yield
    except RuntimeError as error:
        raise RanksLost(
            f"rank {rank} did not meet all {size} ranks within {timeout_s} s: {_gloo_message(error)}"
        ) from error


def _gloo_message(error: Exception) -> str:
    """Return gloo's message without its source file and its advice."""
    text = str(error).partition("] ")[2] or str(error)
    return text.partition(". ")[0].partition("\n")[0]
