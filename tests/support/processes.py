"""Other processes: their state, and results from forked children."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_LIMIT_S = 30.0


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie, whose parent has not read its status, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def in_a_fork(function: Callable[[], object]) -> object:
    """Call `function` in a forked child, and return its result."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run(connection: Connection) -> None:
        connection.send(function())

    child = context.Process(target=run, args=(theirs,))
    child.start()
    try:
        assert ours.poll(_LIMIT_S), "the child does not answer"
        return ours.recv()
    finally:
        child.kill()
        child.join(_LIMIT_S)
        ours.close()
        theirs.close()
