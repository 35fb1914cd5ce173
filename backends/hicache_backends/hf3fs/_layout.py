"""Where everything lies under a root directory.

root-id                        what a Redis index calls this root
lock                           held shared by calls that write, alone by who makes an index anew
index.sqlite                   a symbolic link to the index of one host (`_database`)
index-TOKEN.sqlite             that index
writers/TOKEN                  held locked as long as the writer lives (`_writer`)
spaces/ID/manifest.json        the key space, as JSON
spaces/ID/slots-0000           its slots (`_slot_files`)

What has another name or lies elsewhere is somebody else's, and is never touched.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
_INDEX_NAME = re.compile(r"index-[0-9a-f]{16}\.sqlite(-wal|-shm|-journal)?")
_MANIFEST = "manifest.json"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


class Layout:
    """The paths under one root. Immutable."""

    __slots__ = ("_name", "index", "lock", "root", "spaces", "writers")

    def __init__(self, root: str) -> None:
        self.root = root
        self._name = f"{root}/root-id"
        self.lock = f"{root}/lock"
        self.index = f"{root}/index.sqlite"
        self.writers = f"{root}/writers"
        self.spaces = f"{root}/spaces"

    def make(self) -> None:
        """Make the directories that every root has."""
        for path in (self.root, self.writers, self.spaces):
            os.makedirs(path, exist_ok=True)

    def root_id(self) -> str:
        """What names this root, on whichever host it is mounted; made where it is missing."""
        try:
            with open(self._name, encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            temporary = f"{self._name}-{secrets.token_hex(8)}"
        with open(temporary, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(8))
        with suppress(FileExistsError):  # another one was quicker
            os.link(temporary, self._name)
        os.unlink(temporary)
        return self.root_id()

    def new_index(self) -> str:
        """A path for an index that nothing had before."""
        return f"{self.root}/index-{secrets.token_hex(8)}.sqlite"

    def name_index(self, path: str) -> None:
        """Make the index at `path` the index."""
        temporary = f"{self.index}.new"
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        os.symlink(os.path.basename(path), temporary)
        os.rename(temporary, self.index)

    def remove_indexes(self) -> None:
        """Remove every index, with what SQLite keeps beside it."""
        for name in os.listdir(self.root):
            if name == os.path.basename(self.index) or _INDEX_NAME.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.root}/{name}")

    def space_dir(self, space_id: str) -> str:
        """The directory of a key space."""
        return f"{self.spaces}/{space_id}"

    def make_space(self, space: KeySpace) -> None:
        """Make the directory and the manifest of `space`, unless both are there."""
        directory = self.space_dir(space.id)
        manifest = f"{directory}/{_MANIFEST}"
        if _manifest_space(manifest) == space:
            return
        os.makedirs(directory, exist_ok=True)
        temporary = f"{manifest}.new"
        data = json.dumps(space.manifest(), indent=1).encode()
        with open(os.open(temporary, _FLAGS, 0o666), "wb") as file:
            file.write(data)
            file.truncate()
        with suppress(FileNotFoundError):  # all who make it write the same, and one has renamed it
            os.rename(temporary, manifest)

    def key_spaces(self) -> Iterator[KeySpace]:
        """Every key space whose manifest is that of its directory."""
        with os.scandir(self.spaces) as entries:
            names = sorted(entry.name for entry in entries if _SPACE_NAME.fullmatch(entry.name))
        for name in names:
            space = self.key_space(name)
            if space is not None:
                yield space

    def key_space(self, space_id: str) -> KeySpace | None:
        """The key space with this id; None where it has no manifest."""
        space = _manifest_space(f"{self.space_dir(space_id)}/{_MANIFEST}")
        return space if space is not None and space.id == space_id else None


def _manifest_space(path: str) -> KeySpace | None:
    try:
        with open(path, encoding="utf-8") as file:
            manifest: Any = json.load(file)
        return KeySpace.from_manifest(manifest)
    except (OSError, ValueError):
        return None
