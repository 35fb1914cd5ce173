"""Compare our tier over `file` with vLLM's own `fs` tier: rows of vLLM's CPU tier to files and back.

    python benchmarks/vllm.py [--sizes KIB,KIB] [--rounds N] [--json FILE] [--path DIRECTORY]

`make bench-vllm` makes its environment. vLLM's own tiering spec makes the tiers and the region in
/dev/shm. A run is one job, from `submit_store` or `submit_load` to the poll that reports it. Ours
verifies a checksum of every row; vLLM's has none. vLLM's tier uses O_DIRECT if it can. It is also
measured without O_DIRECT, because `file` uses the page cache. Its compiled part needs CUDA's libraries,
so its Python code is measured. The last tables show the time that the scheduler's thread spends in the
tiers.
"""

from __future__ import annotations

import sys

sys.path.append(sys.path.pop(0))  # this directory has a module of vLLM's name

import hashlib
import importlib
import itertools
import tempfile
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_cpu
from _harness import KIB, MIB, Aim, Candidate, Parser, Report, Section, console, scratch, size_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

vllm_cpu.stand_in()

base: Any = importlib.import_module("vllm.v1.kv_offload.base")
config: Any = importlib.import_module("vllm.v1.kv_offload.config")
factory: Any = importlib.import_module("vllm.v1.kv_offload.factory")
tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
numpy: Any = importlib.import_module("numpy")

JOB_NBYTES = 64 * MIB
FS, BUFFERED, OURS, BARE = "vLLM: fs", "vLLM: fs, buffered", "ours: file", "ours: file, no checksum"
LOOKUPS = 64
"""How many keys a request has, for the time of a step."""
LOOKUP_AIM_S, STEP_AIM_S = 20e-6, 200e-6
LIMIT_S = 60.0
_turns = itertools.count()


class Tier:
    """A tier of vLLM's tiering manager, called as the manager calls it."""

    def __init__(self, name: str, fields: dict[str, Any], row_nbytes: int, rows: int) -> None:
        self.name = name
        self.rows = rows
        self.manager = _manager(fields, row_nbytes, rows)
        (self.tier,) = self.manager.secondary_tiers
        if name == BUFFERED:
            self.tier._use_o_direct = False  # noqa: SLF001 - it has no field for it
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self.nbytes = len(self.memory) // self.manager.primary_tier._num_chunks  # noqa: SLF001 - as vLLM does
        self._jobs = itertools.count()

    def fill(self, seed: int) -> None:
        """Fill the rows with random bytes."""
        data = numpy.random.default_rng(seed).bytes(self.nbytes * self.rows)
        self.memory[: len(data)] = data

    def run(self, keys: list[bytes], request: Any, *, load: bool) -> None:
        """Submit a job, and poll until it is reported."""
        job = tiering.TransferJob(next(self._jobs), keys, numpy.arange(len(keys)), load, request)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        until_s = time.monotonic() + LIMIT_S
        while not (finished := list(self.tier.get_finished_jobs())):
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.name} has not ended a job in {LIMIT_S:g} s")
            time.sleep(0.0001)
        if not finished[0].success:
            raise RuntimeError(f"{self.name} failed a job")

    def close(self) -> None:
        self.memory.release()
        self.manager.shutdown()


class Store(Candidate):
    """A candidate that stores rows under new keys each time, and deletes them afterwards."""

    def __init__(self, tier: Tier, root: Path) -> None:
        self.name = tier.name
        self._tier = tier
        self._root = root
        self._keys: list[bytes] = []

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every key is new
        self._keys = keys_of(next(_turns), self._tier.rows)

    def run(self) -> None:
        self._tier.run(self._keys, request(), load=False)

    def check(self) -> None:
        files = [path for path in self._root.rglob("*") if _is_page(path, self._tier.nbytes)]
        if len(files) != self._tier.rows:
            raise RuntimeError(f"{self.name} stored {len(files)} of {self._tier.rows} rows")
        for path in files:
            path.unlink()


class Load(Candidate):
    """A candidate that loads the same rows each time, over zeros, and compares them afterwards."""

    def __init__(self, tier: Tier) -> None:
        self.name = tier.name
        self._tier = tier
        self._keys = keys_of(next(_turns), tier.rows)
        tier.fill(1)
        self._digest = self._sum()
        tier.run(self._keys, request(), load=False)

    def prepare(self, turn: int) -> None:  # noqa: ARG002 - every turn is the same
        nbytes = self._tier.nbytes * self._tier.rows
        self._tier.memory[:nbytes] = bytes(nbytes)

    def run(self) -> None:
        self._tier.run(self._keys, request(), load=True)

    def check(self) -> None:
        if self._sum() != self._digest:
            raise RuntimeError(f"{self.name} loaded other bytes than were stored")

    def _sum(self) -> bytes:
        return hashlib.sha256(self._tier.memory[: self._tier.nbytes * self._tier.rows]).digest()


class Calls:
    """The calls of one step for a request whose prefix is known, and the time spent in them."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.keys = keys_of(next(_turns), min(LOOKUPS, tier.rows))
        tier.run(self.keys, request(), load=False)

    def known_lookup_s(self) -> float:
        """Return the time of a lookup whose answer is known."""
        asked = request()
        self._ask(asked)
        began_s = time.perf_counter()
        for key in self.keys:
            self.tier.tier.lookup(key, asked)
        taken_s = time.perf_counter() - began_s
        self.tier.tier.on_request_finished(asked)
        return taken_s / len(self.keys)

    def longest_step_s(self) -> float:
        """Return the time of the longest step of a request that asks, gets hits, loads and ends."""
        asked, tier = request(), self.tier.tier
        context = base.ScheduleEndContext((), ())
        job = tiering.TransferJob(
            10**6 + next(_turns), self.keys, numpy.arange(len(self.keys)), True, asked
        )
        longest_s, loads, over = 0.0, False, False
        while not over:
            began_s = time.perf_counter()
            ended = list(tier.get_finished_jobs())
            found = [] if loads else [tier.lookup(key, asked) for key in self.keys]
            if found and all(result is base.LookupResult.HIT for result in found):
                tier.submit_load(job)
                loads = True
            tier.on_schedule_end(context)
            longest_s = max(longest_s, time.perf_counter() - began_s)
            over = loads and bool(ended)
            time.sleep(0.0005)
        tier.on_request_finished(asked)
        return longest_s

    def _ask(self, asked: Any) -> None:
        tier, context = self.tier.tier, base.ScheduleEndContext((), ())
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            list(tier.get_finished_jobs())
            answers = [tier.lookup(key, asked) for key in self.keys]
            tier.on_schedule_end(context)
            if all(answer is base.LookupResult.HIT for answer in answers):
                return
            time.sleep(0.0005)
        raise TimeoutError(f"{self.tier.name} does not find its rows")


def keys_of(turn: int, rows: int) -> list[bytes]:
    """Return vLLM's keys for rows, in group 0."""
    digests = (hashlib.sha256(f"{turn} {row}".encode()).digest() for row in range(rows))
    return [base.make_offload_key(digest, 0) for digest in digests]


def request() -> Any:
    """Return a new request."""
    return base.ReqContext(uuid.uuid4().hex)


def _is_page(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size >= nbytes


def _manager(tier: dict[str, Any], row_nbytes: int, rows: int) -> Any:
    """Return vLLM's tiering manager, with a CPU tier of `rows` rows and one secondary tier."""
    parallel = config.OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    spec = factory.OffloadingSpecFactory.create_spec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=row_nbytes,
            enable_kv_cache_events=False,
            extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": row_nbytes * rows,
                "secondary_tiers": [tier],
            },
            engine_id=uuid.uuid4().hex,
            model=config.OffloadingModelConfig("model", "bfloat16"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=parallel,
            kv_cache_layout="LBHNC",
        )
    )
    return spec.get_manager()


def fields_of(name: str, root: Path) -> dict[str, Any]:
    """Return the config of a tier."""
    if name in (FS, BUFFERED):
        return {"type": "fs", "root_dir": str(root)}
    return {
        "type": "HiCacheTier",
        "module_path": "hicache_storage.integrations.vllm",
        "backend": "file",
        "config": {"path": str(root)},
        "identity": {"revision": "benchmark"},
        "checksum": "none" if name == BARE else "xxh3",
        "load_timeout_s": LIMIT_S,
        "store_timeout_s": LIMIT_S,
    }


def measure(report: Report, row_nbytes: int, options: argparse.Namespace) -> None:
    """Measure stores, loads and calls for rows of one size."""
    rows = max(8, JOB_NBYTES // row_nbytes)
    with scratch(options.path) as root, ExitStack() as stack:
        tiers: dict[str, Tier] = {}
        for number, name in enumerate((FS, BUFFERED, OURS, BARE)):
            fields = fields_of(name, root / str(number))
            tiers[name] = Tier(name, fields, row_nbytes, rows)
            stack.callback(tiers[name].close)
            tiers[name].fill(number)
        for title in ("store", "load"):
            candidates = [
                Store(tier, root / str(number)) if title == "store" else Load(tier)
                for number, tier in enumerate(tiers.values())
            ]
            section = report.measure(
                f"{title}, {rows} rows of {size_text(row_nbytes)}",
                candidates,
                options.rounds,
                work=rows * row_nbytes / 1e9,
                baselines=[FS, BUFFERED],
            )
            for peer in (FS, BUFFERED):
                report.aim(section, OURS, peer, 1.0)
        measure_calls(report, [tiers[FS], tiers[OURS]], size_text(row_nbytes), options.rounds)


def measure_calls(report: Report, tiers: list[Tier], size: str, rounds: int) -> None:
    """Measure how long the scheduler's thread spends in the tiers."""
    calls = [Calls(tier) for tier in tiers]
    for title, unit, aim_s in (
        ("a lookup of a known key", "calls/s", LOOKUP_AIM_S),
        ("the longest step of a request", "steps/s", STEP_AIM_S),
    ):
        is_lookup = aim_s == LOOKUP_AIM_S
        seconds: dict[str, list[float]] = {each.tier.name: [] for each in calls}
        for _ in range(rounds):
            for each in calls:
                taken_s = each.known_lookup_s() if is_lookup else each.longest_step_s()
                seconds[each.tier.name].append(taken_s)
        section = Section(
            title=f"{title}, rows of {size}", unit=unit, work=1.0, seconds=seconds, baselines=[FS]
        )
        report.add(section)
        best_s = sorted(seconds[OURS])[rounds // 2]
        text = f"{section.title}: {best_s * 1e6:.1f} us of {aim_s * 1e6:g} us"
        report.aims.append(Aim(text, 1.0, aim_s / best_s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, rounds=7, page_sizes=(128 * KIB, 2 * MIB, 8 * MIB), path=True)
    options = parser.parsed(arguments)
    place = options.path or Path(tempfile.gettempdir())
    report = Report.begin(place, distributions=["torch", "vllm"])
    console.print("vLLM's fs tier runs its Python code: its compiled part needs CUDA's libraries\n")
    for row_nbytes in options.sizes:
        measure(report, row_nbytes, options)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
