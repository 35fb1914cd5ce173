"""The directory tree that a file backend keeps its pages in.

writers/                       the lock of each live writer (`writer_lock`)
spaces/ID/manifest.json        the key space ID, as JSON
spaces/ID/...                  its pages, as the backend lays them out

A file with any other name belongs to another program. So does everything behind a symbolic link below
the root, but the root itself may be a link. Files of other programs are never touched.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from hicache_storage.backend_support.filesystem import read_own
from hicache_storage.backend_support.manifest import (
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.errors import ConfigError, StorageUnavailable, shown
from hicache_storage.scalars import format_nbytes
from hicache_storage.storage import UnreadableKind, UnreadableSpace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_storage.keys import KeySpace

logger: logging.Logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_OWN_NAMES = re.compile(r"writers|spaces|lost\+found")
_NAMED_FOREIGN = 3
_MOST_MANIFEST_NBYTES = 1 << 20
# A directory, a link or a pipe in place of a manifest belongs to another program.
_NO_MANIFEST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MAKE_ATTEMPTS = 3


class TreeKind(NamedTuple):
    """The marks that distinguish a backend's trees from those of other backends."""

    signs: frozenset[str]
    """Names in the root. Every tree has at least one of them as soon as it has been opened."""
    pages: re.Pattern[str]
    """Matches the entries in a key space's directory that hold pages."""


class DirectoryTree:
    """The part of a store's directory tree that is the same for all file backends. Immutable."""

    __slots__ = ("root", "spaces", "writers")

    backend: ClassVar[str]
    """The name of the backend, for messages."""
    own_names: ClassVar[re.Pattern[str]]
    """Matches the backend's own files in the root, in addition to those that all backends have."""
    kind: ClassVar[TreeKind]
    """The marks of this backend's trees."""
    others: ClassVar[Mapping[str, TreeKind]] = {}
    """Backends whose trees are refused, with their marks."""

    def __init__(self, root: str) -> None:
        self.root: str = root
        self.writers: str = f"{root}/writers"
        self.spaces: str = f"{root}/spaces"

    @classmethod
    def at(cls, path: str) -> Self:
        """Return the tree at `path`. Create nothing.

        Raises:
            ConfigError: `path` holds the store of another backend, or cannot be a path.
        """
        try:
            tree = cls(os.path.abspath(path))
            kind = tree._kind() if cls.others else None
        except ValueError as error:
            raise ConfigError(f"{cls.backend}: path: {error}") from error
        if kind not in (None, cls.backend):
            raise ConfigError(
                f"{cls.backend}: path: {tree.root} is a store of the backend {kind}:"
                " choose that backend, or name another directory"
            )
        return tree

    @classmethod
    def create(cls, path: str) -> Self:
        """Return the tree at `path`. Make its directories if they are missing.

        Raises:
            ConfigError: `path` is not a directory and cannot be made one, or holds the store of another
                backend.
        """
        tree = cls.at(path)
        try:
            os.makedirs(tree.root, exist_ok=True)
            tree.restore()
        except ValueError as error:
            raise ConfigError(f"{cls.backend}: path: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"{cls.backend}: path: {shown(error.filename or path)} cannot be used as a directory"
                f" ({error.strerror}): mount the file system, let this user write there, or name"
                " another directory"
            ) from error
        return tree

    @classmethod
    def missing_root(cls, path: str) -> str | None:
        """Return the root if `path` holds no tree. None if `path` holds one, or cannot be examined."""
        root = os.path.abspath(path)
        try:
            os.stat(cls(root).spaces)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return root
        except OSError:
            return None
        return None

    def restore(self) -> None:
        """Make the directories below the root again. A missing root stays missing.

        Raises:
            OSError: FileNotFoundError if the root is missing, or an error of mkdir(2).
        """
        for path in (self.writers, self.spaces):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise

    def warn_of_misuse(self, capacity_nbytes: int | None) -> None:
        """Log a warning if other programs use the root, or if the file system is below the capacity."""
        with suppress(OSError):  # a root that cannot be listed may still hold pages
            self._warn_of_foreign_files()
        with suppress(OSError):
            self._warn_of_small_system(capacity_nbytes)

    def check_exists(self) -> None:
        """Raise if the tree is gone, because a missing tree is not the same as an empty one.

        Raises:
            StorageUnavailable: The directory of key spaces is gone, or cannot be reached.
        """
        try:
            os.stat(self.spaces)
        except OSError as error:
            state = "is gone" if error.errno == errno.ENOENT else "cannot be reached"
            raise StorageUnavailable(
                f"{self.backend}: {self.spaces} {state}: {error.strerror}"
            ) from error

    # --- key spaces ------------------------------------------------------------------------------

    def space_dir(self, space_id: str) -> str:
        """Return the directory of a key space."""
        return f"{self.spaces}/{space_id}"

    def a_manifest(self) -> str:
        """Return the path of a manifest, or "" if no key space can be found."""
        with suppress(StorageUnavailable):
            return next((f"{entry.path}/{_MANIFEST}" for entry in self.space_entries()), "")
        return ""

    def space_entries(self) -> list[os.DirEntry[str]]:
        """Return the directories of all key spaces, with or without a manifest, in a fixed order.

        Raises:
            StorageUnavailable: The directories cannot be listed.
        """
        self.check_exists()
        return sorted(self.directories(self.spaces, SPACE_ID), key=lambda entry: entry.name)

    def key_space(self, space_id: str) -> KeySpace | None:
        """Return the key space with this id. None if its directory holds no manifest with this id.

        Raises:
            OSError: The manifest cannot be read.
        """
        try:
            data = read_own(f"{self.space_dir(space_id)}/{_MANIFEST}", _MOST_MANIFEST_NBYTES)
        except OSError as error:
            if error.errno in _NO_MANIFEST:
                return None
            raise
        return decode_manifest(data, space_id=space_id)

    def key_spaces(self, *, skip_unreadable: bool) -> Iterator[KeySpace]:
        """Yield every key space that has a manifest in its own directory.

        Args:
            skip_unreadable: Skip key spaces whose manifest cannot be read.

        Raises:
            StorageUnavailable: The directories cannot be listed.
            OSError: A manifest cannot be read, and `skip_unreadable` is False.
        """
        for entry in self.space_entries():
            try:
                space = self.key_space(entry.name)
            except OSError:
                if skip_unreadable:
                    continue
                raise
            if space is not None:
                yield space

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield the directories of key spaces without their own manifest, and say what is wrong.

        Raises:
            StorageUnavailable: The directories cannot be listed.
        """
        for entry in self.space_entries():
            unreadable = self._unreadable(entry.name)
            if unreadable is not None:
                yield unreadable

    def remove_space_dir(self, space_id: str, temp_path: str | None = None) -> bool:
        """Remove the directory of a key space without pages. Return False if new pages have come.

        Only an empty directory is removed: a writer that comes before the removal keeps it, and a
        writer that comes later makes a new one. `temp_path` is as in `make_space`, which puts the
        manifest back.

        Raises:
            StorageUnavailable: Something that belongs to another program is left.
            OSError: The file system refuses one of the steps.
        """
        directory, pages = self.space_dir(space_id), self.kind.pages
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return True
        for name in names:
            if not pages.fullmatch(name) and not self._is_own_manifest(f"{directory}/{name}"):
                raise self.left(f"{directory}/{name}")
        if any(pages.fullmatch(name) for name in names):
            return False
        space = self.key_space(space_id)
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(f"{directory}/{name}")
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if space is not None:
                self.make_space(space, temp_path)
            return False
        return True

    def make_space(self, space: KeySpace, temp_path: str | None = None) -> bool:
        """Make the directory and the manifest of `space`. Return False if both exist already.

        The manifest is written to `temp_path` and renamed. Without `temp_path` the temporary file is
        next to the manifest, and processes that make the key space at the same time write the same
        bytes to it.

        Raises:
            StorageUnavailable: The directory is a symbolic link.
            OSError: The file system refuses one of the steps.
        """
        directory = self.space_dir(space.id)
        self.refuse_link(directory)
        if self._has_manifest(space):
            return False
        manifest = f"{directory}/{_MANIFEST}"
        if temp_path is None:
            for _ in range(_MAKE_ATTEMPTS):
                with suppress(FileNotFoundError):  # another process makes or removes the key space
                    os.makedirs(directory, exist_ok=True)
                    _write_whole(f"{manifest}.new", encode_manifest(space))
                    os.rename(f"{manifest}.new", manifest)
                if self._has_manifest(space):
                    return True
            raise StorageUnavailable(
                f"{self.backend}: {manifest} cannot be made, because other processes remove the"
                " key space"
            )
        try:
            # Write the file first: it fails if the root is gone, and then the root is not made again.
            _write_whole(temp_path, encode_manifest(space))
            os.makedirs(directory, exist_ok=True)
            self.refuse_link(directory)
            os.rename(temp_path, manifest)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp_path)
            raise
        return True

    def refuse_link(self, directory: str) -> None:
        """Raise if the directory of a key space is a symbolic link.

        Raises:
            StorageUnavailable: It is a link.
        """
        if os.path.islink(directory):
            raise StorageUnavailable(
                f"{self.backend}: {directory} is a symbolic link, and its target belongs to another"
                " program: remove the link"
            )

    def left(self, path: str) -> StorageUnavailable:
        """Return the error for a removal that finds a file of another program."""
        return StorageUnavailable(
            f"{self.backend}: {path} belongs to another program, so its key space stays, without its"
            " pages: move it away, and remove the key space again"
        )

    # --- listing ---------------------------------------------------------------------------------

    def directories(self, path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
        """Return the directories in `path` whose whole name matches `name`. Skip links to directories.

        Raises:
            StorageUnavailable: `path` exists, but cannot be listed.
        """
        return [e for e in self.entries(path, name) if e.is_dir(follow_symlinks=False)]

    def entries(self, path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
        """Return the entries of `path` whose whole name matches `name`. A missing `path` has no entries.

        Raises:
            StorageUnavailable: `path` exists, but cannot be listed.
        """
        try:
            with os.scandir(path) as entries:
                return [entry for entry in entries if name.fullmatch(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageUnavailable(
                f"{self.backend}: {path} cannot be listed: {error.strerror}"
            ) from error

    # --- parts -----------------------------------------------------------------------------------

    def _warn_of_foreign_files(self) -> None:
        with os.scandir(self.root) as entries:
            foreign = (
                entry.name
                for entry in entries
                if not (_OWN_NAMES.fullmatch(entry.name) or self.own_names.fullmatch(entry.name))
            )
            names = sorted(islice(foreign, _NAMED_FOREIGN))
        if names:
            logger.warning(
                "%s: %s also holds files of other programs (%s), which do not count for"
                " capacity_nbytes: give the store a directory of its own",
                self.backend,
                self.root,
                ", ".join(map(repr, names)),
            )

    def _warn_of_small_system(self, capacity_nbytes: int | None) -> None:
        system = os.statvfs(self.root)
        nbytes = system.f_blocks * system.f_frsize
        if capacity_nbytes is not None and capacity_nbytes > nbytes:
            logger.warning(
                "%s: capacity_nbytes is %s, but the file system of %s has only %s: lower"
                " capacity_nbytes, so that pages are evicted before the file system is full",
                self.backend,
                format_nbytes(capacity_nbytes),
                self.root,
                format_nbytes(nbytes),
            )

    def _kind(self) -> str | None:
        """Return the backend whose tree the root holds. None if that is not clear."""
        found = {
            kind
            for kind, (signs, _) in self._kinds().items()
            if any(os.path.lexists(f"{self.root}/{sign}") for sign in signs)
        }
        if len(found) != 1:  # the signs name no backend or several, so look at the pages
            try:
                found = self._kinds_of_pages()
            except StorageUnavailable:
                return None
        return found.pop() if len(found) == 1 else None

    def _kinds(self) -> dict[str, TreeKind]:
        return {self.backend: self.kind, **self.others}

    def _kinds_of_pages(self) -> set[str]:
        found: set[str] = set()
        for space in self.directories(self.spaces, SPACE_ID):
            for kind, (_, pages) in self._kinds().items():
                if kind not in found and self.entries(space.path, pages):
                    found.add(kind)
        return found

    def _unreadable(self, space_id: str) -> UnreadableSpace | None:
        """Return what is wrong with the manifest of a key space, or None if it is right."""
        path, data = f"{self.space_dir(space_id)}/{_MANIFEST}", None
        try:
            data = read_own(path, _MOST_MANIFEST_NBYTES)
        except FileNotFoundError:
            pass
        except OSError as error:
            is_known = error.errno in _NO_MANIFEST
            kind = UnreadableKind.DAMAGED if is_known else UnreadableKind.NOT_READ
            reason = "is not a regular file" if is_known else f"cannot be read: {error.strerror}"
            return UnreadableSpace(space_id, kind, f"its manifest {reason}")
        return unreadable_space(space_id, data)

    def _is_own_manifest(self, path: str) -> bool:
        """Return True for a manifest, complete or not, if it is not a link or a directory."""
        if os.path.basename(path) not in (_MANIFEST, f"{_MANIFEST}.new"):
            return False
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except FileNotFoundError:
            return True

    def _has_manifest(self, space: KeySpace) -> bool:
        try:
            return self.key_space(space.id) == space
        except OSError:
            return False


def _write_whole(path: str, data: bytes) -> None:
    with open(os.open(path, _WRITE, 0o666), "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
