"""LMCache's own storage manager for one server, small enough for a test.

with Engine(params) as engine:
    held = engine.write(range(6))
    engine.wipe()
    assert engine.read(range(6)).held == held

L1's allocator and the store and prefetch controllers are LMCache's. Only an engine's copies between
device and L1 are missing: the test fills the objects itself. LMCache's eviction threads pause for a
second at a time; the end of the engine cuts these pauses short.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

from servers import wait_until

from hicache_storage.integrations._backend_choice import BackendChoice
from hicache_storage.storage import HiCacheStorage

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
torch: Any = importlib.import_module("torch")

ADAPTER = {
    "type": "plugin",
    "module_path": "hicache_storage.integrations.lmcache",
    "class_name": "HiCacheL2Adapter",
}
LIMIT_S = 60.0
PATIENT = {"lookup_timeout_s": 20.0}
"""Deadlines that a busy machine keeps, for tests that are not about them."""
L1_GB = 0.02


def named(module: str, name: str) -> Any:
    """Import a name of LMCache's distributed storage manager."""
    return getattr(importlib.import_module(f"lmcache.v1.distributed.{module}"), name)


MemoryLayoutDesc = named("api", "MemoryLayoutDesc")
ObjectKey = named("api", "ObjectKey")
GroupedObjectKeys = named("api", "GroupedObjectKeys")
PrefetchTaskSpec = named("api", "PrefetchTaskSpec")
StorageManager = named("storage_manager", "StorageManager")

_closing = threading.Event()
eviction: Any = importlib.import_module(
    "lmcache.v1.distributed.storage_controllers.eviction_controller"
)
eviction.time = SimpleNamespace(**{**vars(time), "sleep": _closing.wait})


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """One object group: the shapes and types of its parts, and the window of its attention."""

    shapes: tuple[tuple[int, ...], ...] = ((2, 3, 16, 64),)
    dtypes: tuple[str, ...] = ("bfloat16",)
    window: int = -1

    def layout(self) -> Any:
        dtypes = [getattr(torch, name) for name in self.dtypes]
        return MemoryLayoutDesc([torch.Size(shape) for shape in self.shapes], dtypes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One rank of the engine above an LMCache server."""

    model: str = "org/model"
    world_size: int = 1
    rank: int = 0
    salt: str = ""
    groups: tuple[GroupPlan, ...] = (GroupPlan(),)

    def keys(self, chunks: Iterable[int]) -> list[list[Any]]:
        """Return the key of each chunk, for each object group."""
        size, rank = self.world_size, self.rank
        kv_rank = ObjectKey.ComputeKVRank(size, rank, size, rank)
        numbers = list(chunks)
        return [
            [
                ObjectKey(number.to_bytes(32, "big"), self.model, kv_rank, group, self.salt)
                for number in numbers
            ]
            for group in range(len(self.groups))
        ]


@dataclass(frozen=True)
class Read:
    """The prefix that a prefetch has loaded into L1."""

    held: list[list[bytes]]
    """The bytes of the leading chunks, for each object group."""
    l2_hits: int
    elapsed_s: float

    @property
    def chunks(self) -> int:
        """How many leading chunks were loaded for every group."""
        return min(map(len, self.held))


class Engine:
    """LMCache's storage manager with one L2 adapter of this project."""

    def __init__(
        self,
        params: dict[str, Any],
        plan: Plan | None = None,
        *,
        wrap: Callable[[HiCacheStorage], HiCacheStorage] | None = None,
        l1_gb: float = L1_GB,
        **spec: Any,
    ) -> None:
        self.plan = plan or Plan()
        open_storage = BackendChoice.open

        def opened(choice: BackendChoice) -> HiCacheStorage:
            storage = open_storage(choice)
            return storage if wrap is None else wrap(storage)

        with mock.patch.object(BackendChoice, "open", opened):
            self.manager = StorageManager(
                parse_config(
                    {**ADAPTER, "adapter_params": {**PATIENT, **params}, **spec}, l1_gb=l1_gb
                )
            )
        self._requests = 0

    @property
    def adapter(self) -> Any:
        """The adapter, which LMCache may have wrapped."""
        ((_, adapter),) = self.manager.l2_adapters()
        return getattr(adapter, "inner_adapter", adapter)

    @property
    def session(self) -> Any:
        """The adapter's open store."""
        return self.adapter._attachment.session

    @property
    def status(self) -> dict[str, Any]:
        """The adapter's status."""
        status: dict[str, Any] = self.adapter.report_status()
        return status

    def write(
        self, chunks: Iterable[int], seed: int = 0, *, wait: bool = True
    ) -> list[list[bytes]]:
        """Fill chunks as an engine does, and let LMCache store them. Return their bytes."""
        before = self._ended_stores()
        keys = self.plan.keys(chunks)
        held: list[list[bytes]] = []
        for number, (group, row) in enumerate(zip(self.plan.groups, keys, strict=True)):
            objects = self.manager.reserve_write(row, group.layout())
            assert len(objects) == len(row), "L1 is full"
            held.append([_fill(objects[key], seed + number) for key in row])
        self.manager.finish_write([key for row in keys for key in row])
        if wait:
            wait_until(lambda: self._ended_stores() > before and self.is_idle(), LIMIT_S)
        return held

    def wipe(self) -> None:
        """Empty L1, as when a server ends."""
        wait_until(self.is_idle, LIMIT_S)
        wait_until(self._emptied, LIMIT_S)

    def read(self, chunks: Iterable[int]) -> Read:
        """Let LMCache prefetch chunks, as for a request of an engine."""
        keys = self.plan.keys(chunks)
        began_s = time.monotonic()
        handle = self.begin_read(keys)
        assert self.manager.wait_prefetch_status(handle, LIMIT_S)
        elapsed_s = time.monotonic() - began_s
        result = self.manager.query_prefetch_status(handle)
        held: list[list[bytes]] = []
        for row, cells in zip(keys, result.hit_cells, strict=True):
            found = [key for number, key in enumerate(row) if cells.test(number)]
            held.append(self._bytes_of(found))
        return Read(held, result.l2_hit_count, elapsed_s)

    def begin_read(self, keys: list[list[Any]]) -> Any:
        """Begin a prefetch. Return LMCache's handle for it."""
        self._requests += 1
        return self.manager.submit_prefetch_task(
            PrefetchTaskSpec(
                key_groups=[
                    GroupedObjectKeys(row, number, group.layout(), group.window)
                    for number, (group, row) in enumerate(zip(self.plan.groups, keys, strict=True))
                ]
            ),
            f"request-{self._requests}",
        )

    def is_idle(self) -> bool:
        """Return whether no store operation of LMCache waits or runs."""
        status = self.manager.report_status()["store_controller"]
        tasks = self.status["tasks"]["store"]
        return not (status["pending_keys_count"] or status["in_flight_task_count"] or tasks)

    def close(self) -> None:
        _closing.set()
        self.manager.close()
        _closing.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended_stores(self) -> int:
        return int(self.status.get("jobs", {}).get("store_jobs", 0))

    def _emptied(self) -> bool:
        self.manager.clear()
        return int(self.manager.report_status()["l1_manager"]["total_object_count"]) == 0

    def _bytes_of(self, keys: Sequence[Any]) -> list[bytes]:
        if not keys:
            return []
        with self.manager.read_prefetched_results(list(keys)) as objects:
            held = [bytes(one.byte_array) for one in objects]
        self.manager.finish_read_prefetched(list(keys))
        return held


def parse_config(*adapters: dict[str, Any], l1_gb: float = L1_GB) -> Any:
    """Return the storage manager's config of `lmcache server --l2-adapter ...`."""
    logging.getLogger("lmcache").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    named("config", "add_storage_manager_args")(parser)
    arguments = ["--l1-size-gb", str(l1_gb), "--eviction-policy", "LRU", "--no-l1-use-lazy"]
    for adapter in adapters:
        arguments += ["--l2-adapter", json.dumps(adapter)]
    return named("config", "parse_args_to_config")(parser.parse_args(arguments))


def _fill(memory: Any, seed: int) -> bytes:
    """Fill an object with random bits. Return them."""
    view = memoryview(memory.byte_array).cast("B")
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (len(view),), dtype=torch.uint8, generator=generator)
    view[:] = memoryview(bits.numpy())
    return bytes(view)
