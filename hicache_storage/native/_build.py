"""Compile the data plane in place.

This module imports nothing from the package, because the build of the wheel runs it on its own.

python hicache_storage/native/_build.py [--sanitize]
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (
    "module.c",
    "module_directories.c",
    "module_exchanges.c",
    "module_frames.c",
    "module_locked_files.c",
    "module_revocables.c",
    "module_slots.c",
    "module_sockets.c",
    "arguments.c",
    "copies.c",
    "directories.c",
    "exchanges.c",
    "files.c",
    "frames.c",
    "locked_files.c",
    "pieces.c",
    "revocables.c",
    "slots.c",
    "sockets.c",
    "workers.c",
    "xxh3.c",
)
MODULE = "_native.abi3.so"
_FLAGS = (
    *("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra"),
    "-Werror=implicit-function-declaration",  # otherwise the module is built, but cannot be loaded
    "-DPy_LIMITED_API=0x030B0000",  # one build for CPython 3.11 and later
)
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")


def build(*, sanitize: bool = False) -> str:
    """Compile the module next to its sources. Return "", or the reason why it could not be compiled."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler ({compiler[0]})"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return f"there are no Python headers in {include}"
    extra = _SANITIZERS if sanitize else ()
    if os.environ.get("CI"):  # elsewhere, a warning of a new compiler must not prevent the build
        extra = (*extra, "-Werror")
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        target = Path(scratch) / MODULE
        sources = f'-DHICACHE_SOURCES="{_checksum()}"'
        command = [*compiler, *_FLAGS, sources, *extra, f"-I{include}", *SOURCES, "-o", str(target)]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler of this Python
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"{compiler[0]} printed no error"]
            return f"the compiler failed: {said[0]}"
        target.replace(FOLDER / MODULE)
    return ""


def _checksum() -> str:
    checksum: str = runpy.run_path(str(FOLDER / "_sources.py"))["checksum"](FOLDER)
    return checksum


if __name__ == "__main__":
    reason = build(sanitize="--sanitize" in sys.argv[1:])
    print(f"no compiled data plane: {reason}" if reason else f"built {FOLDER / MODULE}")  # noqa: T201 - a command
    sys.exit(1 if reason else 0)
