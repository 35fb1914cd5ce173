"""Compositions for tests, in directories and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sealed_stores import page_file

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage.keys import KeySpace


def file_member(name: str, path: Path, **config: Any) -> dict[str, Any]:
    """Return a `file` store as a member of a composition."""
    return {"name": name, "backend": "file", "config": {"path": str(path), **config}}


def memory_member(name: str, **config: Any) -> dict[str, Any]:
    """Return a `memory` store as a member of a composition."""
    return {"name": name, "backend": "memory", "config": config}


def read_file(roots: list[Path], space: KeySpace, page_hash: str) -> bytes | None:
    """Return the bytes of a page in the first root that has it."""
    found = [page_file(root, space, page_hash) for root in roots]
    return next((path.read_bytes() for path in found if path.is_file()), None)


def write_files(roots: list[Path], space: KeySpace, page_hash: str, data: bytes | None) -> None:
    """Replace a page in each root that has it, or remove it."""
    for path in (page_file(root, space, page_hash) for root in roots):
        if data is None:
            path.unlink(missing_ok=True)
        elif path.is_file():
            path.write_bytes(data)
