"""`vllm serve` on a CPU, with this project's connector, with vLLM's own tiers, or without any."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers import wait_until
from serving.answers import Answer
from serving.engine import ANSWER_TOKENS, EngineServer
from serving.models import TINY, Model, checkpoint, prompt

VERSION = "vLLM 0.32.0"
BLOCK = 32
CHUNK_BLOCKS = 2
CHUNK = BLOCK * CHUNK_BLOCKS
"""The tokens of a page."""
CPU_NBYTES = 16 << 20
"""The CPU tier: 8,192 tokens of `TINY`."""
_TOKEN_NBYTES = CPU_NBYTES // 8192
_OWN_CONNECTOR = "OffloadingConnector"
_FILLERS, _FILLER_TOKENS = 10, 900
_REGION = re.compile(r"/dev/shm/(vllm_offload_[0-9a-f-]+\.mmap)")
_LOOK_S = 1.2
"""The engine publishes its metrics once a second or so."""


def tiers(cpu_nbytes: int = CPU_NBYTES, **fields: Any) -> dict[str, Any]:
    """Return a config of vLLM's own connector: its CPU tier, and what `fields` say."""
    extra = {"cpu_bytes_to_use": cpu_nbytes, "blocks_per_chunk": CHUNK_BLOCKS}
    return {
        "kv_connector": _OWN_CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "offload_prompt_only": False, **fields},
    }


def fs(directory: Path, cpu_nbytes: int = CPU_NBYTES) -> dict[str, Any]:
    """Return a config with vLLM's own `fs` tier."""
    tier = {"type": "fs", "root_dir": str(directory)}
    return tiers(cpu_nbytes, spec_name="TieringOffloadingSpec", secondary_tiers=[tier])


def ours(
    backend: str, config: Mapping[str, Any], cpu_nbytes: int = CPU_NBYTES, **fields: Any
) -> dict[str, Any]:
    """Return a config with HiCacheConnector over a backend."""
    made = tiers(cpu_nbytes, backend=backend, config=dict(config), **fields)
    return {**made, "kv_connector": "HiCacheConnector"}


def tier(backend: str, config: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return one more tier over a backend. vLLM asks it before that of `ours`, and writes to both."""
    return {"type": "HiCacheTier", "backend": backend, "config": dict(config), **fields}


class VLLMServer(EngineServer):
    """A server of one model. Without `kv` it has no store and, unless asked for, no prefix cache."""

    version = VERSION

    def __init__(
        self,
        directory: Path,
        kv: Mapping[str, Any] | None = None,
        *options: str,
        model: Model = TINY,
        prefix_cache: bool | None = None,
        kv_cache_gib: float = 0.5,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory)
        self.kv = kv
        self.options = options
        self.model = model
        self.prefix_cache = kv is not None if prefix_cache is None else prefix_cache
        self.kv_cache_nbytes = int(kv_cache_gib * (1 << 30))
        self.variables = dict(variables or {})
        self._fillers = 0
        self.left: list[Path] = []
        """The shared memory that was still in /dev/shm when the server had ended."""

    def command(self) -> list[str]:
        fixed = f"--host 127.0.0.1 --port {self.port} --dtype float32 --block-size {BLOCK}"
        more = "--max-model-len 4096 --enforce-eager --prefix-caching-hash-algo sha256_cbor"
        words = f"{fixed} {more} --served-model-name m --enable-prompt-tokens-details"
        memory = ["--kv-cache-memory-bytes", str(self.kv_cache_nbytes)]
        cache = "--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching"
        connector = ["--kv-transfer-config", json.dumps(self.kv)] if self.kv else []
        program = str(Path(sys.executable).with_name("vllm"))
        served = [program, "serve", str(checkpoint(self.model)), *words.split(), *memory, cache]
        return [*served, *connector, *self.options]

    def environment(self) -> Mapping[str, str]:
        """Return offline settings, and a path with this process's modules and the plugin."""
        return {
            "PYTHONPATH": ":".join([str(self._distribution()), *(p for p in sys.path if p)]),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process, as with one GPU
            "OMP_WAIT_POLICY": "PASSIVE",
            **self.variables,
        }

    def _distribution(self) -> Path:
        """Write what makes vLLM load `device.py`.

        Its name is `vllm`, because the command asks for the version of a distribution of that name,
        and this one is called vllm-cpu.
        """
        place = self.directory / "distribution"
        information = place / "vllm-0.32.0+cpu.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
        )
        (information / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ndevice = serving.vllm.device:register\n"
        )
        return place

    def ask(self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS, model: str = "m") -> Answer:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        return self.stream("/v1/completions", body, tokens)

    def read(self, part: Any, answer: Answer, now_s: float) -> None:
        """Add what came since the part before."""
        if "error" in part:
            answer.error = str(part["error"])[:300]
            return
        for choice in part["choices"]:
            if choice["token_ids"]:
                answer.first_token_s = answer.first_token_s or now_s
                answer.tokens += choice["token_ids"]
                answer.logprobs += choice["logprobs"]["token_logprobs"]
        if part.get("usage"):
            details: dict[str, int] = part["usage"]["prompt_tokens_details"] or {}
            answer.cached_tokens = details.get("cached_tokens", 0)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == name and all(each in sample for each in wanted)
        )

    def pages(self) -> dict[str, int]:
        """Return how many pages had each result, such as {"load:ok": 31, "store:ok": 62}."""
        name = "vllm:kv_offload_hicache_pages_total{"
        found: dict[str, int] = {}
        for sample, value in self.metrics().items():
            if sample.startswith(name) and value:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample))
                key = f"{labels['operation']}:{labels['verdict']}"
                found[key] = found.get(key, 0) + int(value)
        return found

    def loaded_tokens(self) -> float:
        if self.kv and self.kv["kv_connector"] == _OWN_CONNECTOR:
            return self.total("vllm:kv_offload_tiering_read_bytes_total") / _TOKEN_NBYTES
        return self.pages().get("load:ok", 0) * CHUNK

    def settle(self) -> None:
        """Wait until what was written is the same in two looks, and no job of a tier is left."""
        seen: list[object] = [None]

        def is_settled() -> bool:
            metrics = {
                name: value
                for name, value in self.metrics().items()
                if name.startswith("vllm:kv_offload") and "bytes_total" in name
            }
            active = self.total("vllm:kv_offload_tiering_active_cascade_jobs")
            seen.append((metrics, self.pages()))
            if active or seen[-1] != seen[-2]:
                time.sleep(_LOOK_S)
                return False
            return True

        wait_until(is_settled, 60)

    def flush(self) -> None:
        """Empty the KV cache, and fill the CPU tier with other prompts. The store has all pages then.

        vLLM leaves a prompt out of the CPU tier while too many rows are being stored, so the prompts
        that it took are counted, not those that were asked.
        """
        assert self.kv is not None
        self.settle()
        wait_until(self._reset_prefix_cache, 60)
        cpu_nbytes = self.kv["kv_connector_extra_config"]["cpu_bytes_to_use"]
        full = self._offloaded_nbytes() + cpu_nbytes
        while self._offloaded_nbytes() < full:
            for _ in range(_FILLERS):
                self._fillers += 1
                answer = self.ask(prompt(-self._fillers, _FILLER_TOKENS), 1)
                assert not answer.failed, answer.error
            self.settle()

    def _offloaded_nbytes(self) -> float:
        """Return how much was copied from the KV cache to the CPU tier."""
        return self.total("vllm:kv_offload_store_bytes_total")

    def _reset_prefix_cache(self) -> bool:
        """Empty the KV cache. Return False if vLLM still holds blocks of it."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")  # noqa: S310  # http only
        with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310
            return bool(json.load(reply)["success"])

    def stop(self) -> None:
        """Kill the server and what it has started, and remove its shared memory."""
        super().stop()
        if self.log.exists():
            names = set(_REGION.findall(self.log.read_text(errors="replace")))
            regions = (Path("/dev/shm", name) for name in sorted(names))
            self.left += [region for region in regions if region.exists()]
            for region in self.left:
                region.unlink(missing_ok=True)
