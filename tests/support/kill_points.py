"""Kills a process at its n-th call on files, for every n."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILER = os.environ.get("CC", "cc")
# Each input line is the number of the call at which a forked child is killed. The output line is the
# signal that killed the child, or 0 if the child ended by itself.
_SERVER = """
import ctypes, os, sys
shim = ctypes.CDLL(sys.argv[1])
scope = {"folder": sys.argv[2]}
exec(sys.argv[3], scope)
for line in sys.stdin:
    child = os.fork()
    if not child:
        ready = scope["prepare"]()
        shim.kill_at(int(line))
        scope["work"](ready)
        shim.kill_at(0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(-os.waitstatus_to_exitcode(status), flush=True)
"""


def _joined(separator: str, given: str | None, own: Path) -> str:
    return separator.join([*filter(None, [given]), str(own)])


def library(folder: Path) -> Path:
    """Build the library that counts calls. Skip the test if there is no compiler."""
    if not shutil.which(_COMPILER):
        pytest.skip(f"there is no C compiler ({_COMPILER})")
    built = folder / "kill_points.so"
    subprocess.run([_COMPILER, "-shared", "-fPIC", "-O1", _SOURCE, "-o", built, "-ldl"], check=True)
    return built


@contextmanager
def killed_at(
    shim: Path, folder: Path, script: str, *, native: bool
) -> Generator[Callable[[int], bool], None, None]:
    """Yield a function that runs `script` and kills it at its n-th call. False: it ended before that.

    The script has the variable `folder`, and defines `prepare()`, whose calls do not count, and
    `work(prepared)`.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": _joined(" ", os.environ.get("LD_PRELOAD"), shim),
        "HICACHE_NATIVE": str(int(native)),
        "PYTHONPATH": _joined(os.pathsep, os.environ.get("PYTHONPATH"), _SOURCE.parent),
    }
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, shim, folder, script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(number: int) -> bool:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{number}\n")
            server.stdin.flush()
            ended = int(server.stdout.readline())
            assert ended in (0, signal.SIGKILL)
            return ended == signal.SIGKILL

        yield run
        server.stdin.close()
