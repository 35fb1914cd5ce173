"""What a power cut leaves of a directory: the files and names that were synced.

class PowerShelf(Shelf):  # in a test
    def __init__(self, settings):
        SyncedFiles(settings.path).watch()
        super().__init__(settings)

def cut_power(self):  # the back door of the test class
    SyncedFiles(self.path).restore()
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE, _NAMES = "file", "names"


class SyncedFiles:
    """A copy of everything under a directory that `os.fsync` and `os.fdatasync` have written to disk.

    It is next to the directory, so several processes can add to it. It does not see what is synced
    outside of Python: by C code, `O_SYNC` or SQLite. The content of a file is on disk after a sync of
    the file, and its name after a sync of its directory.
    """

    watched: ClassVar[dict[Path, SyncedFiles]] = {}
    """The directories that this process watches."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).absolute()
        self._copy = self._root.with_name(f"{self._root.name}.synced")

    def watch(self) -> None:
        """From now on, note what this process syncs under the directory."""
        self._copy.mkdir(parents=True, exist_ok=True)
        if not self.watched:
            for name in ("fsync", "fdatasync"):
                setattr(os, name, _noting(getattr(os, name)))
        self.watched[self._root] = self

    def restore(self) -> None:
        """Remove everything that is not on disk. No process may use the directory."""
        root = self._root.stat().st_ino
        rebuilt = self._root.with_name(f"{self._root.name}.rebuilt")
        rebuilt.mkdir()
        self._rebuild(rebuilt, root)
        shutil.rmtree(self._root)
        shutil.rmtree(self._copy)
        rebuilt.rename(self._root)
        self._copy.mkdir()
        for path in (self._root, *self._root.rglob("*")):  # with new numbers
            self.note(path)

    def note(self, path: Path) -> None:
        """Copy a file, or the names in a directory, if it is under this one: it was synced."""
        if path != self._root and self._root not in path.parents:
            return
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                entries = {one.name: [one.inode(), one.is_dir()] for one in os.scandir(path)}
                self._put(_NAMES, status.st_ino, json.dumps(entries).encode(), status)
            else:
                self._put(_FILE, status.st_ino, path.read_bytes(), status)
        except FileNotFoundError:
            return  # another thread has removed it

    def _put(self, kind: str, number: int, data: bytes, status: os.stat_result) -> None:
        temp = self._copy / f"{secrets.token_hex(8)}.temp"
        temp.write_bytes(data)
        os.utime(temp, ns=(status.st_atime_ns, status.st_mtime_ns))
        temp.replace(self._copy / f"{number}.{kind}")

    def _rebuild(self, directory: Path, number: int) -> None:
        names = self._copy / f"{number}.{_NAMES}"
        entries: dict[str, tuple[int, bool]] = {}
        if names.exists():
            entries = json.loads(names.read_bytes())
        for name, (inode, is_dir) in entries.items():
            target = directory / name
            if is_dir:
                target.mkdir()
                self._rebuild(target, inode)
                continue
            data = self._copy / f"{inode}.{_FILE}"
            if data.exists():
                shutil.copy2(data, target)
            else:
                target.touch()  # its name is on disk, but none of its bytes


def _noting(sync: Callable[[int], None]) -> Callable[[int], None]:
    def noted(fd: int) -> None:
        sync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        for files in list(SyncedFiles.watched.values()):
            files.note(path)

    return noted
