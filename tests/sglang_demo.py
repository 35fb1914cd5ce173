"""SGLang's own cache, on a machine without a GPU, with our Redis backend as its third tier.

    python tests/sglang_demo.py redis://127.0.0.1:6379/0

Run it twice: the first process computes a prompt's KV (random numbers that stand for a model's), and
SGLang's controller backs it up; the second, a server that was just started, gets it out of Redis.
`make demo-sglang` does both, with a Redis of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from servers import RedisServer

PROMPT_PAGES = 32
_CONFIG = {
    "backend_name": "redis",
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}


def serve(url: str) -> None:
    """One server's life: recall the prompt if Redis has it, else compute it."""
    warnings.simplefilter("ignore")
    from sglang_engine import PAGE_TOKENS, torch
    from sglang_radix import Server, server_world

    logging.getLogger("sglang").setLevel(logging.ERROR)
    tokens = list(range(PROMPT_PAGES * PAGE_TOKENS))
    torch.manual_seed(0)
    with server_world({**_CONFIG, "url": url}), Server() as server:
        found, held = server.recall(tokens)
        if found:
            source = "out of Redis"
        else:
            source, held = "computed, and backed up by SGLang", server.compute(tokens)
        counters = server.storage.counters()
    digest = hashlib.sha256(b"".join(held)).hexdigest()[:16]
    print(
        f"SGLang {metadata.version('sglang')}, process {os.getpid()}: {len(tokens)} tokens {source}"
    )
    print(
        f"  KV on the device: sha256 {digest}...; pages read {counters.get('load_ok', 0)},", end=""
    )
    print(f" written {counters.get('save_ok', 0)}")


def main() -> int:
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return 0
    with tempfile.TemporaryDirectory() as scratch, RedisServer(Path(scratch)) as redis:
        for _ in range(2):
            command = [sys.executable, __file__, redis.url]
            print("$ python tests/sglang_demo.py", redis.url, flush=True)
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
