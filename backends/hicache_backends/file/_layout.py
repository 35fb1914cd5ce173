"""Where everything lies under a root directory.

usage                          used bytes (`_ledger`)
writers/TOKEN/                 unpublished files of one live writer (`_writer`)
spaces/ID/manifest.json        the key space, as JSON
spaces/ID/HH/HASH              one page (`_page_file`); HH: the first two digits of its hash

What has another name or lies elsewhere is somebody else's, and is never touched.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
_FAN_NAME = re.compile(r"[0-9a-f]{2}")
_PAGE_NAME = re.compile(r"(?:[0-9a-f]{2}){16,64}")
_MANIFEST = "manifest.json"


class Layout:
    """The paths under one root. Immutable."""

    __slots__ = ("root", "spaces", "usage", "writers")

    def __init__(self, root: str) -> None:
        self.root = root
        self.usage = f"{root}/usage"
        self.writers = f"{root}/writers"
        self.spaces = f"{root}/spaces"

    def make(self) -> None:
        """Make the directories that every root has."""
        for path in (self.root, self.writers, self.spaces):
            os.makedirs(path, exist_ok=True)

    def space_dir(self, space_id: str) -> str:
        """The directory of a key space."""
        return f"{self.spaces}/{space_id}"

    def make_space(self, space: KeySpace, temp_path: str) -> bool:
        """Make the directory and the manifest of `space`; False where both were there."""
        directory = self.space_dir(space.id)
        manifest = f"{directory}/{_MANIFEST}"
        if _manifest_space(manifest) == space:
            return False
        with open(temp_path, "x", encoding="utf-8") as file:
            json.dump(space.manifest(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.makedirs(directory, exist_ok=True)
        os.rename(temp_path, manifest)
        return True

    def key_spaces(self) -> Iterator[KeySpace]:
        """Every key space whose manifest is that of its directory."""
        for directory in _entries(self.spaces, _SPACE_NAME):
            space = _manifest_space(f"{directory.path}/{_MANIFEST}")
            if space is not None and space.id == directory.name:
                yield space

    def pages(self, space_id: str) -> Iterator[os.DirEntry[str]]:
        """Every file of a key space whose name is that of a page, right or wrong inside."""
        for fan in _entries(self.space_dir(space_id), _FAN_NAME):
            for entry in _entries(fan.path, _PAGE_NAME):
                if entry.name.startswith(fan.name) and entry.is_file(follow_symlinks=False):
                    yield entry

    def all_pages(self) -> Iterator[os.DirEntry[str]]:
        """Every page file of every key space, known or not."""
        for directory in _entries(self.spaces, _SPACE_NAME):
            yield from self.pages(directory.name)


def _entries(path: str, name: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if name.fullmatch(entry.name):
                    yield entry
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageUnavailable(f"file: {path} cannot be listed: {error.strerror}") from error


def _manifest_space(path: str) -> KeySpace | None:
    """The key space that a manifest describes; None where there is none to be read."""
    try:
        with open(path, encoding="utf-8") as file:
            manifest: Any = json.load(file)
        return KeySpace.from_manifest(manifest)
    except (OSError, ValueError):
        return None
