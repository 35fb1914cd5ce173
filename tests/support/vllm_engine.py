"""vLLM's own engine core on a CPU: scheduler, connector, tiering manager. Only its workers are replaced.

    with Engine({"cpu_bytes_to_use": 1 << 20, "backend": "file", "config": {"path": "..."}}) as engine:
        answer = engine.ask(range(1000, 1101))

`EngineCore` with its `step`, `Scheduler`, `KVCacheManager`, `KVConnectorFactory`, `VllmConfig` and
the region in /dev/shm are vLLM's. `Workers` replaces the GPU workers: it computes the bytes that each
block must hold, writes them where the scheduler says, copies rows as `CPUOffloadingWorker` does, and
compares every block that a request already has. GPU copies, real workers and models are not covered.
As in vLLM, the ranks follow each other in a row, and the blocks follow each other in a rank.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import vllm_cpu
from servers import wait_until

vllm_cpu.stand_in()

torch: Any = importlib.import_module("torch")
config: Any = importlib.import_module("vllm.config")
kv_transfer: Any = importlib.import_module("vllm.config.kv_transfer")
common: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common"
)
sampling: Any = importlib.import_module("vllm.sampling_params")
core: Any = importlib.import_module("vllm.v1.engine.core")
executor: Any = importlib.import_module("vllm.v1.executor.abstract")
interface: Any = importlib.import_module("vllm.v1.kv_cache_interface")
tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.base")
outputs: Any = importlib.import_module("vllm.v1.outputs")
requests: Any = importlib.import_module("vllm.v1.request")

MODULE = "hicache_storage.integrations.vllm"
CONNECTOR = "HiCacheConnector"
BLOCK, HEADS, HEAD_SIZE, LAYERS = 16, 2, 40, 2
"""A block has 10,240 bytes, so a row of one block is padded to 12,288."""
ROW_ALIGNMENT = 4096
LIMIT_S = 20.0
PATIENT = {"lookup_timeout_s": 15.0}
"""Deadlines that a busy machine keeps, for tests that are not about them."""
PROMPT = range(1000, 1000 + 6 * BLOCK + 5)
"""Six full blocks and a part of another."""
FULL = 6 * BLOCK

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 30000,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
}
_SCRATCH = tempfile.TemporaryDirectory()


def model_dir(name: str = "model", **changes: Any) -> str:
    """Return a directory with a tiny Llama's config, which is all that `ModelConfig` reads."""
    path = Path(tempfile.mkdtemp(dir=_SCRATCH.name)) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


MODEL = model_dir()


@dataclass
class Answer:
    """What an engine did for one request."""

    computed: int | None = None
    """How many tokens the engine had when the request was scheduled; None if it never was."""
    wrong: int = 0
    """How many of the blocks that the engine had have wrong bytes."""
    held_s: float | None = None
    """How long the request waited until it was scheduled."""
    steps: int = 0
    sources: dict[str, int] = field(default_factory=dict[str, int])
    """vLLM's own count of the prompt's tokens, by where they came from."""
    finished: bool = False


class Workers(executor.Executor):  # type: ignore[misc]
    """All GPU workers of one engine. A GPU block is one byte string per rank."""

    window: ClassVar[int | None] = None
    """The attention window of every second layer, in tokens."""
    weights: str = ""
    """A text that stands for everything else on which the bytes of a block depend."""

    def _init_executor(self) -> None:
        self.ranks: int = self.parallel_config.world_size
        self.gpu: dict[int, list[bytes]] = {}
        self.region: mmap.mmap | None = None
        self.seen: dict[str, tuple[float, int, int]] = {}
        self.stored = 0
        self.loaded = 0
        self.holds_stores = False
        """True while the workers do not report their stores."""

    def specs(self) -> dict[str, Any]:
        kv_type = self.cache_config.cache_dtype
        own = kv_type in ("auto", "bfloat16")
        shape = {
            "block_size": BLOCK,
            "num_kv_heads": max(1, HEADS // self.ranks),
            "head_size": HEAD_SIZE if own else 2 * HEAD_SIZE,
            "dtype": self.model_config.dtype if own else torch.uint8,
        }
        full = interface.FullAttentionSpec(**shape)
        window = (
            interface.SlidingWindowSpec(**shape, sliding_window=self.window)
            if self.window
            else full
        )
        return {
            f"model.layers.{n}.self_attn.attn": window if n % 2 else full for n in range(LAYERS)
        }

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        answers: dict[Any, Callable[[], Any]] = {
            "get_kv_cache_spec": self.specs,
            "get_supported_kv_cache_layouts": lambda: ["LBHNC", "LBNHC"],
            "determine_available_memory": lambda: 8 << 20,
        }
        return [answers[method]() if method in answers else None] * self.ranks

    def compile_or_warm_up_model(self) -> None: ...

    def check_health(self) -> None: ...

    def initialize_from_config(self, configs: Any) -> None:
        self.groups = configs[0].kv_cache_groups
        self.nbytes = configs[0].kv_cache_tensors[0].size // configs[0].num_blocks
        """How many bytes one block of one rank has."""

    def content(self, group: int, tokens: Sequence[int], end: int) -> list[bytes]:
        """Return the bytes of the block that ends at token `end`, one string per rank."""
        said = json.dumps([self.weights, group, list(tokens[:end])]).encode()
        return [
            random.Random(
                hashlib.sha256(said + b"%d of %d" % (rank, self.ranks)).digest()
            ).randbytes(self.nbytes)
            for rank in range(self.ranks)
        ]

    def rows(self) -> tuple[mmap.mmap, int]:
        """Return vLLM's memory region, and how many bytes a row has."""
        transfer = self.vllm_config.kv_transfer_config
        self.per_chunk = int(transfer.kv_connector_extra_config.get("blocks_per_chunk", 1))
        if self.region is None:
            descriptor = os.open(f"/dev/shm/vllm_offload_{transfer.engine_id}.mmap", os.O_RDWR)
            self.region = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        row = self.nbytes * self.ranks * self.per_chunk
        return self.region, -(-row // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def copy(self, cpu: Any, gpu: Any, *, store: bool) -> None:
        """Copy one job: GPU blocks of each group in order, and rows of chunks in the same order."""
        region, stride = self.rows()
        blocks, chunks = iter(gpu.block_ids), iter(cpu.block_ids)
        for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=False):
            chunk = None
            for index in range(first, first + size):
                if chunk is None or index % self.per_chunk == 0:
                    chunk = int(next(chunks))
                block, place = int(next(blocks)), index % self.per_chunk
                for rank in range(self.ranks):
                    start = chunk * stride + (rank * self.per_chunk + place) * self.nbytes
                    if store:
                        region[start : start + self.nbytes] = self.gpu[block][rank]
                    else:
                        held = self.gpu.setdefault(block, [b""] * self.ranks)
                        held[rank] = region[start : start + self.nbytes]
                self.stored += store
                self.loaded += not store

    def execute_model(self, out: Any, *_: Any, **__: Any) -> Future[Any]:
        told = out.kv_connector_metadata
        for job in told.load_jobs.values():
            self.copy(job.src_spec, job.dst_spec, store=False)
        for new in out.scheduled_new_reqs:
            self._run(new, out.num_scheduled_tokens[new.req_id])
        for job in told.store_jobs.values():
            self.copy(job.dst_spec, job.src_spec, store=True)
        jobs = [*told.load_jobs, *told.store_jobs]
        done = outputs.KVConnectorOutput(
            finished_recving={job.req_id for job in told.load_jobs.values()} or None,
            kv_connector_worker_meta=common.OffloadingWorkerMetadata(
                completed_jobs=dict.fromkeys(jobs, self.ranks)
            )
            if jobs
            else None,
        )
        ids = list(out.num_scheduled_tokens)
        future: Future[Any] = Future()
        places = {name: place for place, name in enumerate(ids)}
        future.set_result(
            outputs.ModelRunnerOutput(ids, places, [[7] for _ in ids], kv_connector_output=done)
        )
        return future

    def _run(self, new: Any, scheduled: int) -> None:
        tokens, done = new.prompt_token_ids, new.num_computed_tokens
        wrong = 0
        for group, ids in enumerate(new.block_ids):
            for place in range(min(len(ids), (done + scheduled) // BLOCK)):
                if not ids[place]:  # the block is outside the window
                    continue
                end = (place + 1) * BLOCK
                wanted = self.content(group, tokens, end)
                if end <= done:
                    wrong += self.gpu.get(ids[place]) != wanted
                else:
                    self.gpu[ids[place]] = wanted
        self.seen[new.req_id] = (time.monotonic(), done, wrong)

    def shutdown(self) -> None:
        if self.region is not None:
            self.region.close()


class Engine:
    """One engine, which begins without cached blocks. `model_fields` are those of `ModelConfig`."""

    def __init__(
        self,
        extra: dict[str, Any],
        *,
        connector: str = CONNECTOR,
        module: str | None = MODULE,
        model: str = MODEL,
        tp: int = 1,
        window: int | None = None,
        hash_algo: str = "sha256",
        kv_dtype: str = "auto",
        weights: str = "",
        events: bool = False,
        edit: Callable[[Any], None] | None = None,
        **model_fields: Any,
    ) -> None:
        """Start an engine. `edit` may change the `VllmConfig`."""
        patient = PATIENT if "backend" in extra else {}
        transfer = kv_transfer.KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_connector_extra_config=json.loads(
                json.dumps({"cpu_bytes_to_use": 1 << 20, **patient, **extra})
            ),
        )
        fields = {"dtype": "bfloat16", **model_fields}
        vllm_config = config.VllmConfig(
            model_config=config.ModelConfig(
                model=model, skip_tokenizer_init=True, enforce_eager=True, **fields
            ),
            cache_config=config.CacheConfig(
                block_size=BLOCK, prefix_caching_hash_algo=hash_algo, cache_dtype=kv_dtype
            ),
            kv_transfer_config=transfer,
            device_config=config.DeviceConfig(device="cpu"),
            parallel_config=config.ParallelConfig(
                tensor_parallel_size=tp, distributed_executor_backend="mp"
            ),
            scheduler_config=config.SchedulerConfig.default_factory(
                max_model_len=1024,
                is_encoder_decoder=False,
                async_scheduling=False,
                disable_hybrid_kv_cache_manager=False,
            ),
        )
        if events:
            vllm_config.kv_events_config = importlib.import_module(
                "vllm.config.kv_events"
            ).KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if edit:
            edit(vllm_config)
        workers = type("TheseWorkers", (Workers,), {"window": window, "weights": weights})
        self.core = core.EngineCore(vllm_config, workers, log_stats=True)
        self.count = 0
        self.workers: Any = self.core.model_executor
        self.connector: Any = self.core.scheduler.connector
        self.stats: list[Any] = []
        """The connector's statistics of each step that had some."""
        self.events: list[Any] = []

    @property
    def manager(self) -> Any:
        """vLLM's tiering manager."""
        return self.connector.connector_scheduler.manager

    @property
    def tier(self) -> Any:
        """The first secondary tier."""
        return self.manager.secondary_tiers[0]

    def start(self, tokens: Iterable[int], name: str | None = None) -> Any:
        """Add a request that generates one token."""
        self.count += 1
        asked = requests.Request(
            name or f"r{self.count}",
            list(tokens),
            sampling.SamplingParams(max_tokens=1),
            None,
            block_hasher=self.core.request_block_hasher,
        )
        self.core.add_request(asked)
        return asked

    def ask(self, tokens: Iterable[int], limit_s: float = LIMIT_S) -> Answer:
        """Run one request until it is done, or until `limit_s` is over."""
        answer, began_s = Answer(), time.monotonic()
        asked = self.start(tokens)
        while time.monotonic() - began_s < limit_s and not answer.finished:
            self.step(answer)
            answer.finished = asked.is_finished()
        if asked.request_id in self.workers.seen:
            at_s, answer.computed, answer.wrong = self.workers.seen.pop(asked.request_id)
            answer.held_s = at_s - began_s
        if not answer.finished:
            self.core.abort_requests([asked.request_id])
        return answer

    def write(self, tokens: Iterable[int]) -> Answer:
        """Run one request, and return when its stores are done."""
        answer = self.ask(tokens)
        assert self.settle()
        return answer

    def step(self, answer: Answer | None = None) -> None:
        outputs_by_client, _ = self.core.step()
        if answer is not None:
            answer.steps += 1
        for output in outputs_by_client.values():
            stats = output.scheduler_stats
            if stats and stats.kv_connector_stats:
                self.stats.append(stats.kv_connector_stats)
            hits = stats and stats.connector_prefix_cache_stats
            if hits and answer is not None:
                answer.sources.update({kind.value: n for kind, n in hits.hits_by_source.items()})
        time.sleep(0.001)

    def settle(self, limit_s: float = LIMIT_S) -> bool:
        """Step as an idle engine does, until nothing is under way."""
        until_s = time.monotonic() + limit_s
        while self.core.scheduler.has_requests() and time.monotonic() < until_s:
            self.step()
        return not self.core.scheduler.has_requests()

    def step_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Step until `condition` holds."""

        def holds() -> bool:
            self.step()
            return condition()

        wait_until(holds, limit_s)

    def forget_gpu(self) -> None:
        """Empty only the GPU's prefix cache, so that the next request must ask the connector."""
        assert self.core.scheduler.kv_cache_manager.reset_prefix_cache()

    def forget_host(self) -> None:
        """Empty the GPU's cache and vLLM's CPU tier, so that only the store is left."""
        self.forget_gpu()
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        """Shut down as `EngineCore.shutdown` does, except for its last line, which needs a GPU."""
        self.core.structured_output_manager.clear_backend()
        self.workers.shutdown()
        self.core.scheduler.shutdown()
        gc.unfreeze()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
