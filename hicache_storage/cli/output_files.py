"""Files that a verb writes beside what it prints: checked before the work, written after it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    from pathlib import Path


def check_output(flag: str, path: Path | None) -> None:
    """Refuse an unwritable file before the work rather than after it.

    Raises:
        ConfigError: The path is a directory, or in none.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--{flag} {shown(path)}: is a directory, not a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--{flag} {shown(path)}: there is no directory {shown(path.parent)}")


def write_text(flag: str, path: Path, text: str) -> None:
    """Write the file of a flag.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--{flag} {shown(path)}: cannot be written: {error.strerror}") from None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write the file of `--json`. Raises what `write_text` raises."""
    write_text("json", path, json.dumps(document, indent=2) + "\n")
