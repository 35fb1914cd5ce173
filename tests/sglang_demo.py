"""SGLang's own cache on a machine without a GPU, with the Redis backend as its third tier.

    python tests/sglang_demo.py redis://127.0.0.1:6379/0

Run it twice. The first process computes a prompt's KV (random numbers instead of a model's), and
SGLang's controller backs it up. The second process is a new server and loads the KV from Redis.
`make demo-sglang` does both, with a Redis of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from engine_demos import FROM_REDIS, demo

PROMPT_PAGES = 32
_CONFIG = {
    "backend_name": "redis",
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}


def serve(url: str) -> None:
    """Run a server that loads the prompt's KV from Redis, or computes it."""
    warnings.simplefilter("ignore")
    from sglang_engine import PAGE_TOKENS, torch
    from sglang_radix import Server, server_world

    logging.getLogger("sglang").setLevel(logging.ERROR)
    tokens = list(range(PROMPT_PAGES * PAGE_TOKENS))
    torch.manual_seed(0)
    with server_world({**_CONFIG, "url": url}), Server() as server:
        found, held = server.load_prefix(tokens)
        if found:
            source = FROM_REDIS
        else:
            source, held = "computed, and backed up by SGLang", server.compute(tokens)
        counters = server.storage.counters()
    digest = hashlib.sha256(b"".join(held)).hexdigest()
    read, written = counters.get("load_ok", 0), counters.get("save_ok", 0)
    version = metadata.version("sglang")
    print(f"SGLang {version}, process {os.getpid()}: {len(tokens)} tokens {source}")
    print(f"  pages read {read}, written {written}; KV on the device: sha256 {digest}")


if __name__ == "__main__":
    sys.exit(demo(__file__, serve, "on both devices"))
