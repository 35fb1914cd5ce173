"""The memory of LMCache's MP server on a machine without a GPU, with the Redis backend as its L2.

    python tests/lmcache_demo.py redis://127.0.0.1:6379/0

Run it twice. The first process computes a prompt's KV (random numbers instead of a model's), and
LMCache's store controller stores it. The second process is a new server, whose prefetch controller
loads the KV from Redis. `make demo-lmcache` does both, with a Redis of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from servers import RedisServer

CHUNKS = 32
CHUNK_TOKENS = 256
_FROM_REDIS = "out of Redis"
"""What a process prints if it did not compute the KV itself."""


def serve(url: str) -> None:
    """Run a server that loads the prompt's KV from Redis, or computes it."""
    warnings.simplefilter("ignore")
    from lmcache_engine import Engine, GroupPlan, Plan

    plan = Plan(groups=(GroupPlan(shapes=((2, 4, CHUNK_TOKENS, 128),)),))
    params = {"backend": "redis", "config": {"url": url}, "revision": "main"}
    with Engine(params, plan, l1_gb=0.1) as engine:
        read = engine.read(range(CHUNKS))
        if read.chunks:
            source, held = _FROM_REDIS, read.held
        else:
            source, held = "computed, and stored by LMCache", engine.write(range(CHUNKS))
        pages = engine.status["pages"]
    digest = hashlib.sha256(b"".join(held[0])).hexdigest()
    loaded, stored = pages.get("load_ok", 0), pages.get("save_ok", 0)
    version = metadata.version("lmcache")
    print(f"LMCache {version}, process {os.getpid()}: {CHUNKS * CHUNK_TOKENS} tokens {source}")
    print(f"  pages read {loaded}, written {stored}; KV in L1: sha256 {digest}", flush=True)


def main() -> int:
    """Serve with the Redis of the command line, or start a Redis and run this script twice with it.

    Return 0 if the second process got from Redis what the first one had computed.
    """
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return 0
    outputs: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, RedisServer(Path(scratch)) as redis:
        for _ in range(2):
            command = [sys.executable, "-W", "ignore", __file__, redis.url]
            print(f"$ python tests/{Path(__file__).name} {redis.url}", flush=True)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            outputs.append(done.stdout)
    first, second = (re.findall(r"sha256 (\w+)", output) for output in outputs)
    if not first or first != second or _FROM_REDIS not in outputs[1]:
        print("the second process did not get what the first one had computed")
        return 1
    print("the same bytes in both memories")
    return 0


if __name__ == "__main__":
    sys.exit(main())
