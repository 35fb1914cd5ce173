"""Runs `hicache` in a process of its own, on a terminal or with a signal, over a slow file store."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_stores import CliStore
from servers import wait_until

# If a script starts a program in the background with "&", the program and its children ignore Ctrl-C,
# unless it sets a handler itself.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMMAND = [sys.executable, "-m", "hicache_storage.cli"]

_SLOW = """
import pathlib, time
from hicache_backends.file import FileStorage
from hicache_backends.file.reader import FileReader
MARK = pathlib.Path(__file__).with_suffix(".called")
HELD = pathlib.Path(__file__).with_suffix(".held")
class SlowReads:
    def batch_get(self, space, hashes, pages):
        MARK.touch()
        while HELD.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        return super().batch_get(space, hashes, pages)
class SlowReader(SlowReads, FileReader):
    pass
class Slow(SlowReads, FileStorage):
    @classmethod
    def open_read_only(cls, config):
        return SlowReader.from_config(config)
"""


def slow_store(store: CliStore, directory: Path) -> CliStore:
    """Return a store on the files of `store` whose reads take 0.3 s each, for verbs in `directory`."""
    (directory / "slow_store.py").write_text(_SLOW)
    place = {
        "backend_name": "slow",
        "module_path": "slow_store",
        "class_name": "Slow",
        **store.config,
    }
    return CliStore("dynamic", place)


@contextmanager
def verb(directory: Path, *argv: str) -> Generator[subprocess.Popen[str], None, None]:
    """Run `hicache` in `directory`, with pipes. The process is killed at the end."""
    process = subprocess.Popen(
        [*COMMAND, *argv],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(directory: Path, *argv: str) -> tuple[int, str, str]:
    """Run a verb, and send SIGINT at the first slow read. Return exit code, output and errors."""
    held = directory / "slow_store.held"
    held.touch()  # no read ends before the signal
    with verb(directory, *argv) as process:
        wait_until((directory / "slow_store.called").exists)
        process.send_signal(signal.SIGINT)
        held.unlink()
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors


def on_terminal(directory: Path, typed: str, *argv: str) -> tuple[int, str]:
    """Run `hicache` on a terminal where somebody types. Return the exit code and the output."""
    leader, follower = pty.openpty()
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [*COMMAND, *argv],
        cwd=directory,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
    ) as process:
        os.close(follower)
        os.write(leader, typed.encode())
        output = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the process has ended
                break
            if not part:
                break
            output += part
        process.wait(60)
    os.close(leader)
    return process.returncode, output.decode()
