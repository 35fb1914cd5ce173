"""Modules of the folder that a command was typed in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage.registry import DYNAMIC

if TYPE_CHECKING:
    from collections.abc import Mapping


def add_cwd_to_path(backend: str, config: Mapping[str, Any]) -> None:
    """Let `dynamic` name a module of the working directory.

    An installed command, unlike `python -m`, does not look there. What can be imported already comes
    from where it always does.
    """
    here, module_path = str(Path.cwd()), config.get("module_path")
    if backend != DYNAMIC or not isinstance(module_path, str) or here in sys.path:
        return
    top = module_path.partition(".")[0]
    if top.isidentifier() and importlib.util.find_spec(top) is None:
        sys.path.append(here)
