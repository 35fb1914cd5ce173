"""A file for each page, in a directory for each key space.

PATH/SPACE/manifest.json      the key space, as JSON
PATH/SPACE/HASH               one page, bare
PATH/SPACE/.tmp-PID-TOKEN     a file that process PID is writing

Other files under PATH belong to other programs, and the store never touches them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.references.plain import FileName, PlainStore
from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.settings import PositiveSeconds, Settings
from hicache_storage.storage import Capabilities, Durability, PageInfo, PageTimes, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_SPACE = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{32,128}")
_TEMP = re.compile(r"\.tmp-(?P<pid>[0-9]+)-[0-9a-f]+")
_MANIFEST = "manifest.json"


class ShelfSettings(Settings):
    """The config of `Shelf`."""

    path: FileName
    """The directory, which the store creates if it is missing."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit that every store has. A file system has none."""
    reads_only: bool = False
    """True: create, remove and renew nothing, for programs that only look."""


class Shelf(PlainStore):
    """A store of files. It writes a page to another name and renames it, so a page is whole or absent.

    Pages survive their process, but not a loss of power. Its own methods: `_path` is the file of a
    page, and `_temp_path` the file that is written first. `_write_file` writes it, `_publish`
    renames it. `_prepare` runs at the start, unless the store only reads; its `_sweep` removes the
    files of killed writers.
    """

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=4,
    )
    usable_after_fork = True  # no file stays open between two calls

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__()
        self._root = Path(settings.path).expanduser().absolute()
        self._reads_only = settings.reads_only
        if not settings.reads_only:
            try:
                self._prepare()
            except OSError as error:
                raise self._unavailable(error) from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(ShelfSettings.parse("shelf", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        return cls.from_config({**config, "reads_only": True})

    def _prepare(self) -> None:
        """Create the root, and remove the files of killed writers."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        self.ensure_open()
        found = [_modified_s(self._path(space, page_hash)) for page_hash in hashes]
        return [PageTimes(written_at_s=modified_s) for modified_s in found]

    # --- one page ------------------------------------------------------------------------------------

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return _size(self._path(space, page_hash)) == space.stored_nbytes

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        try:
            return self._path(space, page_hash).read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            self._counters.add("unreadable")
            return None

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return self._remember(space) and self._replaced(self._path(space, page_hash), data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        try:
            self._path(space, page_hash).unlink(missing_ok=True)
        except OSError:
            self._counters.add("undeletable")
            return False
        return True

    # --- files ---------------------------------------------------------------------------------------

    def _folder(self, space: KeySpace) -> Path:
        return self._root / space.id

    def _path(self, space: KeySpace, page_hash: str) -> Path:
        return self._folder(space) / page_hash

    def _temp_path(self, path: Path) -> Path:
        """Return a unique name with the id of the writing process."""
        return path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(8)}")

    def _replaced(self, path: Path, data: bytes) -> bool:
        """Make a file of `data` at `path` in one step. Return False if the disk refused it."""
        return self._placed(path, lambda temp: self._write_file(temp, data))

    def _placed(self, path: Path, write: Callable[[Path], None]) -> bool:
        """Make a file at `path` in one step, with the bytes that `write` writes."""
        temp = self._temp_path(path)
        try:
            write(temp)
            self._publish(temp, path)
        except OSError:
            self._counters.add("refused")
            self._discard(temp)
            return False
        return True

    def _write_file(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def _publish(self, temp: Path, path: Path) -> None:
        temp.replace(path)

    def _discard(self, temp: Path) -> None:
        temp.unlink(missing_ok=True)

    def _sweep(self) -> None:
        for folder in self._entries(self._root, _SPACE):
            for temp in self._entries(folder, _TEMP):
                name = _TEMP.fullmatch(temp.name)
                if name and not _is_alive(int(name["pid"])):
                    self._discard(temp)

    # --- listings --------------------------------------------------------------------------------------

    def _remember(self, space: KeySpace) -> bool:
        manifest = self._folder(space) / _MANIFEST
        if manifest.exists():
            return True
        try:
            manifest.parent.mkdir(exist_ok=True)
        except OSError:
            self._counters.add("refused")
            return False
        return self._replaced(manifest, json.dumps(space.manifest()).encode())

    def _known_spaces(self) -> list[KeySpace]:
        found = [_space_in(folder) for folder in self._entries(self._root, _SPACE)]
        return [space for space in found if space is not None]

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = [(path.name, _size(path)) for path in self._entries(self._folder(space), _PAGE)]
        return [PageInfo(name, nbytes) for name, nbytes in found if nbytes is not None]

    def _entries(self, folder: Path, name: re.Pattern[str]) -> Iterator[Path]:
        """Yield the files of a folder whose names match `name`, or none if there is no folder."""
        try:
            listed = list(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return iter(())
        except OSError as error:
            raise self._unavailable(error) from error
        return (path for path in listed if name.fullmatch(path.name))

    def _unavailable(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(f"shelf: {self._root} can't be used: {error.strerror}")


def _size(path: Path) -> int | None:
    """Return the length of the file at `path`, or None if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _space_in(folder: Path) -> KeySpace | None:
    """Return the key space of a folder, if it has a manifest."""
    try:
        space = KeySpace.from_manifest(json.loads((folder / _MANIFEST).read_bytes()))
    except (OSError, ValueError):
        return None
    return space if space.id == folder.name else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # the process belongs to another user
    return True
