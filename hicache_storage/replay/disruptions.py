"""Disruptions of a replay: injected faults and a swap of backends, from the flags to the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.errors import ConfigError
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    import argparse
    from contextlib import ExitStack

    from hicache_storage.replay.driver import Replay
    from hicache_storage.replay.faults import FaultPlan
    from hicache_storage.storage import HiCacheStorage
    from hicache_storage.testing import FaultyStorage


@dataclass(slots=True, kw_only=True)
class Disruptions:
    """The faults and the swap of one replay."""

    faults: FaultPlan | None = None
    swap: config.StorageChoice | None = None
    swap_after: int | None = None
    """How many requests run before the swap."""
    _faulty: list[FaultyStorage] = field(default_factory=list["FaultyStorage"])

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags, in their own group."""
        add = parser.add_argument_group("disruptions").add_argument
        add(
            "--faults",
            metavar="PLAN",
            help="make the storage fail: get:raise@5%%,set:flip@1%%,seed=7 (syntax: docs/guide.md)",
        )
        add(
            "--swap-backend",
            metavar="NAME",
            help="change to another storage while requests run",
        )
        add("--swap-extra-config", metavar="JSON|@FILE", help="config of that backend")
        add(
            "--swap-after",
            type=config.positive_int,
            metavar="N",
            help="number of requests before the change (default: half of them)",
        )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, requests: int) -> Disruptions:
        """Read the flags, for a trace of `requests` requests.

        Raises:
            ConfigError: The fault plan is invalid, or a flag needs another flag that is missing.
        """
        from hicache_storage.replay.faults import FaultPlan  # noqa: PLC0415 - keeps `--help` fast

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
                f"--swap-after {after}: the trace has {counted(requests, 'request')}: give a"
                " smaller number"
            )
        swap = config.StorageChoice(
            backend=arguments.swap_backend,
            config=config.load_extra_config(
                arguments.swap_extra_config, where="--swap-extra-config"
            ),
        )
        return cls(faults=faults, swap=swap, swap_after=after)

    def open(
        self, choice: config.StorageChoice, opened: ExitStack
    ) -> tuple[HiCacheStorage, HiCacheStorage | None]:
        """Open the first storage and, for a swap, the second one. `opened` closes both."""
        first = self._open(choice, opened)
        return first, None if self.swap is None else self._open(self.swap, opened)

    def figures(self, replay: Replay) -> dict[str, Any]:
        """Return the disruptions so far, ready for JSON, with null for a kind that is not configured."""
        from hicache_storage.replay.faults import fault_counts  # noqa: PLC0415

        faults = swap = None
        if self.faults is not None:
            faults = {"plan": self.faults.text, "struck": fault_counts(self._faulty)}
        if self.swap is not None and replay.swap is not None:
            swap = {
                "backend": self.swap.backend,
                "after_requests": self.swap_after,
                **replay.swap.figures(),
            }
        return {"faults": faults, "swap": swap}

    def _open(self, choice: config.StorageChoice, opened: ExitStack) -> HiCacheStorage:
        storage = opened.enter_context(choice.open())
        if self.faults is None:
            return storage
        faulty = opened.enter_context(self.faults.wrap(storage))
        self._faulty.append(faulty)
        return faulty
