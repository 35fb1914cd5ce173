"""Directories that go for good, also while processes that were just killed may still write to them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

_LIMIT_S = 5.0
_POLL_S = 0.01


def remove_tree(path: Path | str) -> None:
    """Remove a directory with all that is in it, again if a write was still on its way."""
    deadline_s = time.monotonic() + _LIMIT_S
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not Path(path).exists() or time.monotonic() > deadline_s:
            return
        time.sleep(_POLL_S)
