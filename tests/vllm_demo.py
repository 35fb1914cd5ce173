"""vLLM's own engine core on a machine without a GPU, with the Redis backend as a tier of its offloading.

    python tests/vllm_demo.py redis://127.0.0.1:6379/0

Run it twice. In the first process an engine computes a prompt's KV (random numbers instead of a
model's), and vLLM offloads it. The second process is a cold engine and gets the KV out of Redis.
`make demo-vllm` does both, with a Redis of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from importlib import metadata

from engine_demos import FROM_REDIS, demo

PROMPT_BLOCKS = 32


def serve(url: str) -> None:
    """Run an engine that gets the prompt's KV out of Redis, or computes it."""
    warnings.simplefilter("ignore")
    from vllm_engine import BLOCK, Engine

    tokens = list(range(1000, 1000 + PROMPT_BLOCKS * BLOCK + 1))
    extra = {"backend": "redis", "config": {"url": url}, "weights": "demo", "blocks_per_chunk": 4}
    with Engine(extra, served_model_name="demo") as engine:
        answer = engine.write(tokens)
        counters = engine.tier._connection.runner.stats()
        blocks = [engine.workers.gpu[block] for block in sorted(engine.workers.gpu)]
    computed = answer.computed or 0
    source = FROM_REDIS if computed else "computed, and offloaded by vLLM"
    digest = hashlib.sha256(b"".join(part for block in blocks for part in block)).hexdigest()
    version = metadata.version("vllm")
    print(f"vLLM {version}, process {os.getpid()}: {PROMPT_BLOCKS * BLOCK} tokens {source}")
    print(
        f"  tokens from the store {computed}, wrong blocks {answer.wrong}, pages read"
        f" {counters.get('load_pages_ok', 0)}, written {counters.get('store_pages_ok', 0)};"
        f" KV on the device: sha256 {digest}"
    )


if __name__ == "__main__":
    sys.exit(demo(__file__, serve, "on both devices"))
