"""Every call that only looks at a store, and a snapshot of what such calls must not change."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pages import blank

from hicache_storage import KeySpace
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage


def snapshot(root: Path) -> dict[str, tuple[int, int, Any]]:
    """Return the mode, modification time and content of everything under a directory."""
    found: dict[str, tuple[int, int, Any]] = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        content: Any = None
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path.relative_to(root))] = status.st_mode, status.st_mtime_ns, content
    return found


def look(storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
    """Make every call that only looks, and those that a read-only storage refuses.

    Return the hits of a get of `hashes`.
    """
    storage.open_space(space)
    for found in {space, *storage.spaces()}:
        listed = [info.page_hash for info in storage.scan(found)]
        for some in (hashes, listed):
            storage.batch_exists(found, some)
            storage.page_times(found, some)
            storage.batch_get(found, some, [blank(found.stored_nbytes) for _ in some])
            list(storage.faults(found, some))
        list(storage.faults(found))
        with suppress(UnsupportedOperation):
            storage.clear(found)
        with suppress(UnsupportedOperation):
            storage.batch_delete(found, hashes)
    for unreadable in storage.unreadable_spaces():
        with suppress(UnsupportedOperation):
            storage.remove_space(unreadable.space_id)
    storage.diagnose()
    storage.stats()
    return storage.batch_get(space, hashes, [blank(space.stored_nbytes) for _ in hashes])


@contextmanager
def read_only_mount(root: Path, place: Path) -> Generator[Path]:
    """Mount a directory read-only, or skip the test if this user may not."""
    place.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None or _fails(mount, "--bind", root, place):
        pytest.skip("this user may not mount")
    try:
        assert not _fails(mount, "-o", "remount,ro,bind", place)
        yield place
    finally:
        assert not _fails(unmount, place)


@contextmanager
def user_without_rights(root: Path, hidden: str = "") -> Generator[None, None, None]:
    """Take from this process the right to change the files of `root`, but not the right to read.

    Files with a path that ends in `hidden` cannot be read either.
    """
    for path in (root, *root.rglob("*")):
        is_hidden = hidden and str(path).endswith(hidden)
        path.chmod(0o555 if path.is_dir() else 0o000 if is_hidden else 0o444)
    if os.geteuid() != 0:
        yield
    else:
        os.seteuid(65_534)
        try:
            yield
        finally:
            os.seteuid(0)
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def _fails(*command: str | Path) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode
