"""The frames between an engine's call and the system call that moves its pages."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from hicache_storage import native

_OURS = ("hicache_storage", "hicache_backends")
_SOURCES = Path(native.__file__).parent


class PathFrames:
    """The longest path of the project's functions into the compiled data plane."""

    def __init__(self) -> None:
        self.caller: list[str] = []
        """From the engine's call to the wait for the lane's threads."""
        self.thread: list[str] = []
        """From the thread's loop to the function that calls the data plane."""


@contextmanager
def path_frames(engine_call: str, entry: str) -> Generator[PathFrames]:
    """Record how `engine_call` reaches the function `entry` of the data plane, during the `with` block.

    The page store starts its threads in the block.
    """
    found, caller = PathFrames(), threading.get_ident()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is getattr(native, entry):
            path = _names(sys._current_frames()[caller])
            if engine_call in path and len(thread := _names(frame)) > len(found.thread):
                found.thread = thread
                found.caller = path[path.index(engine_call) : path.index("Waiting.wait") + 1]

    threading.setprofile(note)
    try:
        yield found
    finally:
        threading.setprofile(None)


def c_frames(names: Sequence[str]) -> int:
    """Return how many functions are on a path through the C sources that ends with a system call.

    Fail if a function of the path does not call the next one.
    """
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(_SOURCES.glob("*.c")))
    for name, called in pairwise(names):
        bodies = re.findall(
            rf"^[\w *]*\b{name}\([^;{{}}]*\) \{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL
        )
        assert any(re.search(rf"\b{called}\(", body) for body in bodies), f"{name} -> {called}"
    return len(names) - 1


def _names(frame: FrameType | None) -> list[str]:
    """Return the project's functions from the outermost one to `frame`."""
    names: list[str] = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[::-1]
