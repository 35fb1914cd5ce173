"""Compare our backends with LMCache's `fs`, `fs_native` and `resp`, as L2 adapters of its MP server.

python benchmarks/lmcache_l2.py [--rounds N] [--only file,redis] [--sizes 128,2048,8192]

`make bench-lmcache` makes its environment. A run is one task as LMCache's controllers submit it: from
the call until the eventfd has announced the result. All adapters move the same objects. Ours frame every
page and verify its checksum; LMCache's do neither. The last table shows the time that LMCache's threads
spend in our methods. The file is not named `lmcache.py`, because Python would import that instead of
LMCache.
"""

from __future__ import annotations

import importlib
import os
import select
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from _disk import empty_files, spread_directories
from _harness import KIB, MIB, Parser, Report, console, names, page_hashes_of, scratch, size_text
from _servers import redis_server
from _store import DIRECTIONS, BatchRun, Memory, Store, memories
from rich.table import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    Batch: TypeAlias = tuple[Memory, Memory]

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
torch: Any = importlib.import_module("torch")

SIZES = (128 * KIB, 2 * MIB, 8 * MIB)
BATCH_NBYTES = 64 * MIB
LIMIT_S = 60.0
KEYS_OF_A_STEP = 64


def named(module: str, name: str) -> Any:
    """Import a name from LMCache."""
    return getattr(importlib.import_module(f"lmcache.v1.{module}"), name)


class Adapter(Store):
    """An L2 adapter. Its calls wait for results as LMCache's controllers do."""

    def __init__(
        self, name: str, spec: dict[str, Any], empty: Callable[[], None], batch: Batch
    ) -> None:
        super().__init__(*batch)
        self.name = name
        self.empty = empty
        self._objects = [objects_of(memory) for memory in batch]
        self._keys: list[Any] = []
        registry = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
        config = registry.get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self.adapter = named("distributed.l2_adapters", "create_l2_adapter")(config)
        self.adapter.set_backend_identity(spec["type"])

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self._keys = keys_of(hashes)

    def prepare_get(self, hashes: Sequence[str]) -> None:
        super().prepare_get(hashes)
        self._keys = keys_of(hashes)

    def set(self) -> None:
        self.store(self._keys, self._objects[0])

    def get(self) -> None:
        self.load(self._keys, self._objects[1])

    def store(self, keys: list[Any], objects: list[Any]) -> None:
        task = self.adapter.submit_store_task(keys, objects)
        results: dict[int, Any] = {}

        def stored() -> bool:
            results.update(self.adapter.pop_completed_store_tasks())
            return task in results

        self._wait(self.adapter.get_store_event_fd(), stored)
        if not results[task].is_successful():
            raise RuntimeError(f"{self.name} did not store a task")

    def load(self, keys: list[Any], objects: list[Any]) -> None:
        task = self.adapter.submit_load_task(keys, objects)
        found: list[Any] = []

        def loaded() -> bool:
            bitmap = self.adapter.query_load_result(task)
            if bitmap is not None:
                found.append(bitmap)
            return bool(found)

        self._wait(self.adapter.get_load_event_fd(), loaded)
        if found[0].popcount() != len(keys):
            raise RuntimeError(f"{self.name} loaded {found[0].popcount()} of {len(keys)} objects")

    def look_up(self, keys: list[Any]) -> None:
        """Look keys up, and wait for the result."""
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        self._wait(
            self.adapter.get_lookup_and_lock_event_fd(),
            lambda: self.adapter.query_lookup_and_lock_result(task) is not None,
        )

    def close(self) -> None:
        self.adapter.close()

    def _wait(self, event_fd: int, done: Callable[[], bool]) -> None:
        poll = select.poll()
        poll.register(event_fd, select.POLLIN)
        while not done():
            if not poll.poll(LIMIT_S * 1000):
                raise TimeoutError(f"{self.name} did not end a task")
            with suppress(BlockingIOError):
                os.eventfd_read(event_fd)


def keys_of(hashes: Sequence[str]) -> list[Any]:
    object_key = named("distributed.api", "ObjectKey")
    return [object_key(bytes.fromhex(one), "org/model", 0x01000100) for one in hashes]


def objects_of(memory: Memory) -> list[Any]:
    """Return the pages of `memory` as objects of LMCache's L1: 16 tokens of bfloat16."""
    metadata = named("memory_management", "MemoryObjMetadata")
    tensor_object = named("memory_management", "TensorMemoryObj")
    shape = torch.Size((2, 1, 16, memory.page_nbytes // 64))
    return [
        tensor_object(
            torch.frombuffer(view, dtype=torch.uint8),
            metadata(
                shape=shape,
                dtype=torch.bfloat16,
                address=0,
                phy_size=len(view),
                ref_count=1,
                shapes=[shape],
                dtypes=[torch.bfloat16],
            ),
            None,
        )
        for view in memory.views
    ]


def ours(backend: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "hicache_storage.integrations.lmcache",
        "class_name": "HiCacheL2Adapter",
        "adapter_params": {
            "backend": backend,
            "config": config,
            "revision": "",
            "load_timeout_s": 30,
            "store_timeout_s": 30,
        },
    }


def file_adapters(stack: ExitStack, root: Path, batch: Batch) -> list[Adapter]:
    spread_directories(root)
    folders = {name: root / name for name in ("ours", "fs", "fs_native")}
    specs: dict[str, tuple[Path, dict[str, Any]]] = {
        "ours: file": (folders["ours"], ours("file", {"path": str(folders["ours"])})),
    }
    for kind in ("fs", "fs_native"):
        spec = {"type": kind, "base_path": str(folders[kind])}
        specs[f"LMCache: {kind}"] = (folders[kind], spec)
    made: list[Adapter] = []
    for name, (path, spec) in specs.items():
        path.mkdir()
        made.append(Adapter(name, spec, partial(empty_files, path), batch))
        stack.callback(made[-1].close)
    return made


def redis_adapters(stack: ExitStack, root: Path, batch: Batch) -> list[Adapter]:  # noqa: ARG001
    port = stack.enter_context(redis_server())
    client: Any = redis.Redis(port=port)
    stack.callback(client.close)
    specs = {
        "ours: redis": ours("redis", {"url": f"redis://127.0.0.1:{port}", "timeout_s": 30}),
        "LMCache: resp": {"type": "resp", "host": "127.0.0.1", "port": port},
    }
    made: list[Adapter] = []
    for name, spec in specs.items():
        made.append(Adapter(name, spec, client.flushall, batch))
        stack.callback(made[-1].close)
    return made


KINDS: dict[str, Callable[[ExitStack, Path, Batch], list[Adapter]]] = {
    "file": file_adapters,
    "redis": redis_adapters,
}


def measure(report: Report, kind: str, page_nbytes: int, options: argparse.Namespace) -> None:
    """Measure both directions of one kind of store, for objects of one size."""
    pages = max(4, BATCH_NBYTES // page_nbytes)
    batch = memories(pages, page_nbytes)
    with scratch(options.path) as root, ExitStack() as stack:
        adapters = KINDS[kind](stack, root, batch)
        ours, *theirs = (one.name for one in adapters)
        for direction in DIRECTIONS:
            verb = {"set": "store", "get": "load"}[direction]
            section = report.measure(
                f"{kind}, {verb}: {pages} objects of {size_text(page_nbytes)}",
                [BatchRun(adapter, direction, empty=adapter.empty) for adapter in adapters],
                options.rounds,
                work=batch[0].gb,
                baselines=theirs,
            )
            for baseline in theirs:
                report.aim(section, ours, baseline, 1.0)
        print_calls(adapters[0], batch[0])


def print_calls(adapter: Adapter, source: Memory) -> None:
    """Print how long LMCache's threads spend in an adapter's methods."""
    objects = objects_of(source)[:KEYS_OF_A_STEP]
    keys = keys_of(page_hashes_of("calls", 0, len(objects)))
    adapter.store(keys, objects)
    shown = Table(title=f"{adapter.name}: inside our methods", title_justify="left")
    for column in ("method", "objects", "us a call", "us an object"):
        shown.add_column(column, justify="left" if column == "method" else "right")
    calls: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        "submit_lookup_and_lock_task": (adapter.look_up, (keys,)),
        "submit_load_task": (adapter.load, (keys, objects)),
        "submit_store_task": (adapter.store, (keys, objects)),
    }
    for method, (call, arguments) in calls.items():
        call_us = timed_us(adapter, method, call, arguments)
        shown.add_row(method, str(len(keys)), f"{call_us:.0f}", f"{call_us / len(keys):.1f}")
    console.print(shown)


def timed_us(
    adapter: Adapter, method: str, call: Callable[..., None], arguments: tuple[Any, ...]
) -> float:
    """Return the median time of one of the adapter's methods, in microseconds."""
    inner = getattr(adapter.adapter, method)
    taken: list[float] = []

    def watched(*given: Any) -> Any:
        began_s = time.perf_counter()
        result = inner(*given)
        taken.append(time.perf_counter() - began_s)
        return result

    setattr(adapter.adapter, method, watched)
    for _ in range(30):
        call(*arguments)
    setattr(adapter.adapter, method, inner)
    return statistics.median(taken) * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, rounds=7, page_sizes=SIZES, path=True)
    parser.add_argument("--only", type=names, default=list(KINDS), help="kinds of stores")
    options = parser.parsed(arguments)
    place = Path(tempfile.gettempdir())
    report = Report.begin(place, distributions=["torch", "lmcache", "redis"])
    for kind in options.only:
        for page_nbytes in options.sizes:
            measure(report, kind, page_nbytes, options)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
