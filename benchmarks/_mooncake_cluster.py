"""A Mooncake cluster of the benchmark: a master, and a process that lends memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from _ports import free_ports, wait_for

if TYPE_CHECKING:
    from collections.abc import Generator

_END_LIMIT_S = 20.0
_NODE = """
import json, sys
from hicache_storage import open_storage
with open_storage("mooncake", json.loads(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def master() -> Generator[dict[str, Any], None, None]:
    """Run a master on loopback; yield the config of a client that lends nothing.

    Raises:
        FileNotFoundError: The program is not installed.
    """
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which("mooncake_master", path=places)
    if program is None:
        raise FileNotFoundError("no mooncake_master here: `make bench-mooncake` has it")
    port, http_port = free_ports(2)
    command = [program, "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={http_port}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(port)
            yield {
                "master_server_address": f"127.0.0.1:{port}",
                "master_metrics_port": http_port,
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 0,
                "timeout_s": 600.0,
            }
        finally:
            process.kill()
            process.wait()


@contextmanager
def node(config: dict[str, Any], nbytes: int) -> Generator[None, None, None]:
    """Run a process that lends `nbytes` to the cluster of `config`."""
    fields = json.dumps({**config, "global_segment_size": nbytes})
    with ExitStack() as stack:
        process = subprocess.Popen(
            [sys.executable, "-c", _NODE, fields], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(process.communicate, timeout=_END_LIMIT_S)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that lends memory did not start")
        yield
