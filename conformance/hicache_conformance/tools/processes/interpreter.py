"""Starts a fresh interpreter that runs a module of the kit, with a pipe to this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection


def start_interpreter(
    module: str,
    connection: Connection,
    *,
    environment: Mapping[str, str] | None = None,
    owns_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Run `module` as a program whose argument is the number of `connection`, which it inherits.

    `environment` adds variables to those of this process. With `owns_group`, the new process leads
    a group of processes.
    """
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    number = connection.fileno()
    return subprocess.Popen(  # noqa: S603 - this interpreter, our module
        [sys.executable, "-P", "-m", module, str(number)],
        pass_fds=(number,),
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0 if owns_group else None,
    )
