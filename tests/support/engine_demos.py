"""Runs an engine's demo: one process computes a prompt's KV, and a second loads it from Redis."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from servers import RedisServer

FROM_REDIS = "out of Redis"
"""What a process prints if it did not compute the KV itself."""


def demo(script: str, serve: Callable[[str], None], where: str) -> int:
    """Serve with the Redis of the command line, or start a Redis and run `script` twice with it.

    Return 0 if the second process got from Redis what the first one had computed. `where` names the
    memories that hold the KV.
    """
    if len(sys.argv) > 1:
        serve(sys.argv[1])
        return 0
    outputs: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, RedisServer(Path(scratch)) as redis:
        for _ in range(2):
            command = [sys.executable, "-W", "ignore", script, redis.url]
            sys.stdout.write(f"$ python tests/{Path(script).name} {redis.url}\n")
            sys.stdout.flush()
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            sys.stdout.write(done.stdout)
            sys.stdout.flush()
            outputs.append(done.stdout)
    first, second = (re.findall(r"sha256 (\w+)", output) for output in outputs)
    if not first or first != second or FROM_REDIS not in outputs[1]:
        sys.stdout.write("the second process did not get what the first one had computed\n")
        return 1
    sys.stdout.write(f"the same bytes {where}\n")
    return 0
