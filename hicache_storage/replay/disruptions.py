"""What goes wrong on purpose while a trace is replayed: the flags, and what the report says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.errors import ConfigError
from hicache_storage.replay.faults import FaultPlan, struck

if TYPE_CHECKING:
    import argparse
    from contextlib import ExitStack

    from hicache_storage.replay.driver import Replay
    from hicache_storage.storage import HiCacheStorage
    from hicache_storage.testing import FaultyStorage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, in a group of their own."""
    add = parser.add_argument_group("trouble").add_argument
    add(
        "--faults",
        metavar="PLAN",
        help="make the storage fail: get:raise@5%%,set:flip@1%%,seed=7 (docs/guide.md has the words)",
    )
    add(
        "--swap-backend",
        metavar="NAME",
        help="exchange the storage for another one while requests run",
    )
    add("--swap-extra-config", metavar="JSON|@FILE", help="the other backend's config")
    add(
        "--swap-after",
        type=config.positive_int,
        metavar="N",
        help="requests before the exchange (default: half of them)",
    )


@dataclass(slots=True, kw_only=True)
class Trouble:
    """The faults and the exchange that a replay is to survive."""

    faults: FaultPlan | None = None
    swap: config.StorageChoice | None = None
    swap_after: int | None = None
    """Requests before the exchange."""
    _faulty: list[FaultyStorage] = field(default_factory=list["FaultyStorage"])

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, requests: int) -> Trouble:
        """What the flags say, for a trace of so many requests.

        Raises:
            ConfigError: A plan that is wrong, or flags that do not go together.
        """
        faults = None if arguments.faults is None else FaultPlan.parse(arguments.faults)
        if arguments.swap_backend is None:
            for name in ("extra_config", "after"):
                if getattr(arguments, f"swap_{name}") is not None:
                    flag = name.replace("_", "-")
                    raise ConfigError(f"--swap-{flag} needs --swap-backend")
            return cls(faults=faults)
        after = requests // 2 if arguments.swap_after is None else arguments.swap_after
        if after >= requests:
            raise ConfigError(
                f"--swap-after {after}: the trace has {requests} requests, give fewer"
            )
        swap = config.StorageChoice(
            backend=arguments.swap_backend,
            config=config.load_extra_config(arguments.swap_extra_config),
        )
        return cls(faults=faults, swap=swap, swap_after=after)

    def open(
        self, choice: config.StorageChoice, opened: ExitStack
    ) -> tuple[HiCacheStorage, HiCacheStorage | None]:
        """The storage of the flags, and the one that it is exchanged for; `opened` closes them."""
        first = self._opened(choice, opened)
        return first, None if self.swap is None else self._opened(self.swap, opened)

    def figures(self, replay: Replay) -> dict[str, Any]:
        """What has happened, ready for JSON; null where nothing was asked for."""
        faults = swap = None
        if self.faults is not None:
            faults = {"plan": self.faults.text, "struck": struck(self._faulty)}
        if self.swap is not None and replay.swap is not None:
            swap = {
                "backend": self.swap.backend,
                "after_requests": self.swap_after,
                **replay.swap.figures(),
            }
        return {"faults": faults, "swap": swap}

    def _opened(self, choice: config.StorageChoice, opened: ExitStack) -> HiCacheStorage:
        storage = opened.enter_context(choice.open())
        if self.faults is None:
            return storage
        faulty = opened.enter_context(self.faults.wrap(storage))
        self._faulty.append(faulty)
        return faulty
