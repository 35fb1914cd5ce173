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

import errno
import json
import os
import re
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE_NAME = re.compile(r"[0-9a-f]{32}")
_INDEX_FILE = re.compile(r"index-[0-9a-f]{16}\.sqlite")
_INDEX_NAME = re.compile(rf"{_INDEX_FILE.pattern}(-wal|-shm|-journal)?")
_ROOT_ID = re.compile(r"[0-9a-f]{16}")
_MANIFEST = "manifest.json"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


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
        """Return what names this root, on whichever host it is mounted; make it where it is missing.

        Raises:
            ConfigError: The file holds something else.
        """
        try:
            with open(self._name, encoding="latin-1") as file:
                found = file.read(1024)
        except FileNotFoundError:
            self._make_root_id()
            return self.root_id()
        if not _ROOT_ID.fullmatch(found):
            raise ConfigError(
                f"hf3fs: path: {self._name} does not hold the id of a root: name another directory, or"
                " remove that file; the index is made anew then"
            )
        return found

    def index_file(self) -> str | None:
        """Return the path of the index, or None where there is none.

        Raises:
            StorageUnavailable: Its name leads to something that is not ours.
        """
        try:
            target = os.readlink(self.index)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise self._foreign() from None
        if not _INDEX_FILE.fullmatch(target) or os.path.islink(f"{self.root}/{target}"):
            raise self._foreign()
        return f"{self.root}/{target}"

    def new_index(self) -> str:
        """Return a path for an index that nothing had before."""
        return f"{self.root}/index-{secrets.token_hex(8)}.sqlite"

    def name_index(self, path: str) -> None:
        """Make the index at `path` the index."""
        temporary = f"{self.index}.new"
        if os.path.islink(temporary):
            os.unlink(temporary)
        os.symlink(os.path.basename(path), temporary)
        os.rename(temporary, self.index)

    def remove_indexes(self) -> None:
        """Remove every index of ours, with what SQLite keeps beside it."""
        if self.index_file() is not None:
            os.unlink(self.index)
        for name in os.listdir(self.root):
            if _INDEX_NAME.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.root}/{name}")

    def _make_root_id(self) -> None:
        temporary = f"{self._name}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "x", encoding="ascii") as file:
                file.write(secrets.token_hex(8))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another one was quicker
                os.link(temporary, self._name)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _foreign(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"hf3fs: {self.index} is not an index of hf3fs: name another directory as path, or move that"
            " file away"
        )

    def space_dir(self, space_id: str) -> str:
        """The directory of a key space."""
        return f"{self.spaces}/{space_id}"

    def make_space(self, space: KeySpace) -> None:
        """Make the directory and the manifest of `space`, unless both are there.

        Raises:
            StorageUnavailable: The directory is a link to one that is not ours.
        """
        directory = self.space_dir(space.id)
        if os.path.islink(directory):
            raise StorageUnavailable(
                f"hf3fs: {directory} is a symbolic link: what it leads to is not ours; remove the link"
            )
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
    """Return the key space of a manifest, or None where there is none, or it is no manifest."""
    try:
        with open(path, encoding="utf-8") as file:
            manifest: Any = json.load(file)
        return KeySpace.from_manifest(manifest)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
