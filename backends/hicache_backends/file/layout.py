"""Where everything lies under a root directory.

usage                          used bytes (`_ledger`)
survey/                        the oldest pages, for all processes (`_victims_file`)
writers/TOKEN/                 unpublished files of one live writer (`_writer`)
spaces/ID/manifest.json        the key space, as JSON
spaces/ID/HH/HASH              one page (`_page_file`); HH: the first two digits of its hash

What has another name or lies elsewhere is somebody else's, and is never touched. So is what lies behind
a symlink: the root may be one, nothing under it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_backends.file.descriptors import read_own
from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
_FAN_NAME = re.compile(r"[0-9a-f]{2}")
_PAGE_NAME = re.compile(r"(?:[0-9a-f]{2}){16,64}")
_MANIFEST = "manifest.json"
_MOST_MANIFEST_NBYTES = 1 << 20
FANS = [f"{number:02x}" for number in range(256)]
"""The directories of a key space. Hashes spread pages evenly over them."""


class Layout:
    """The paths under one root. Immutable."""

    __slots__ = ("root", "spaces", "survey", "usage", "writers")

    def __init__(self, root: str) -> None:
        self.root = root
        self.usage = f"{root}/usage"
        self.survey = f"{root}/survey"
        self.writers = f"{root}/writers"
        self.spaces = f"{root}/spaces"

    def make(self) -> None:
        """Make the directories that every root has."""
        os.makedirs(self.root, exist_ok=True)
        self.remake()

    def remake(self) -> None:
        """Make what every root has. A root that is gone is not made again.

        Raises:
            FileNotFoundError: The root is gone.
        """
        for path in (self.writers, self.spaces):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise

    def space_dir(self, space_id: str) -> str:
        """The directory of a key space."""
        return f"{self.spaces}/{space_id}"

    def make_space(self, space: KeySpace, temp_path: str) -> bool:
        """Make the directory and the manifest of `space`; False where both were there."""
        directory = self.space_dir(space.id)
        manifest = f"{directory}/{_MANIFEST}"
        if _manifest_space(manifest) == space:
            return False
        try:
            with open(temp_path, "x", encoding="utf-8") as file:
                json.dump(space.manifest(), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.makedirs(directory, exist_ok=True)
            refuse_link(directory)
            os.rename(temp_path, manifest)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp_path)
            raise
        return True

    def key_spaces(self) -> Iterator[KeySpace]:
        """Every key space whose manifest is that of its directory."""
        for directory in self._space_dirs():
            space = _manifest_space(f"{directory.path}/{_MANIFEST}")
            if space is not None and space.id == directory.name:
                yield space

    def pages(self, space_id: str) -> Iterator[list[os.DirEntry[str]]]:
        """Every file of a key space whose name is that of a page, right or wrong inside.

        One list a directory, read to its end: what is removed meanwhile hides nothing from the listing.
        """
        self.check_there()
        yield from _pages_of(_directories(self.space_dir(space_id), _FAN_NAME))

    def is_new(self) -> bool:
        """Whether there is no key space yet, and therefore no page."""
        return not self._space_dirs()

    def all_pages(self) -> Iterator[os.DirEntry[str]]:
        """Every page file of every key space, known or not."""
        for directory in self._space_dirs():
            for pages in _pages_of(_directories(directory.path, _FAN_NAME)):
                yield from pages

    def pages_in(self, fan: str) -> Iterator[os.DirEntry[str]]:
        """The page files in one fan directory of every key space: a fair sample of all pages."""
        only = re.compile(fan)
        for directory in self._space_dirs():
            for pages in _pages_of(_directories(directory.path, only)):
                yield from pages

    def _space_dirs(self) -> list[os.DirEntry[str]]:
        self.check_there()
        return _directories(self.spaces, _SPACE_NAME)

    def check_there(self) -> None:
        """Raise where there is no store at all: nothing can be said of its pages then."""
        try:
            os.stat(self.spaces)
        except OSError as error:
            raise StorageUnavailable(f"file: {self.spaces} is gone: {error.strerror}") from error


def refuse_link(directory: str) -> None:
    """Raise where a directory of ours is a symlink: what is behind it is somebody else's."""
    if stat.S_ISLNK(os.lstat(directory).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), directory)


def _pages_of(fans: list[os.DirEntry[str]]) -> Iterator[list[os.DirEntry[str]]]:
    for fan in fans:
        yield [
            entry
            for entry in _entries(fan.path, _PAGE_NAME)
            if entry.name.startswith(fan.name) and entry.is_file(follow_symlinks=False)
        ]


def _directories(path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(path, name) if entry.is_dir(follow_symlinks=False)]


def _entries(path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if name.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageUnavailable(f"file: {path} cannot be listed: {error.strerror}") from error


def _manifest_space(path: str) -> KeySpace | None:
    """The key space that a manifest describes; None where there is none to be read."""
    try:
        manifest: Any = json.loads(read_own(path, _MOST_MANIFEST_NBYTES))
        return KeySpace.from_manifest(manifest)
    except (OSError, ValueError):
        return None
