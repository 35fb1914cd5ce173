"""The paths of everything under a root directory, and the format of a slot.

root-id                        the name of this root in a Redis index
lock                           held shared by calls that write, exclusively to rebuild the index
index.sqlite                   a symbolic link to the index of one host (`index.sqlite_database`)
index-TOKEN.sqlite             that index
index.redis                    the place of a Redis index, and the token of the process that built it
writers/TOKEN                  locked as long as the writer lives (`writer`)
spaces/ID/manifest.json        a description of key space ID, as JSON
spaces/ID/slots-0000           its slots (`slots`)

`DirectoryTree` has the rules for files of other programs.

A slot contains one page: a mark, the page's bytes, the same mark again, zeros up to a whole block.

    offset  bytes  field of the mark
    0       4      magic "HiSl"
    4       2      format version
    6       1      length of the page hash in bytes
    7       1      zero
    8       16     key-space id
    24      24     stamp
    48      64     page hash, zeros
    112     8      zeros
    120     8      xxh3-64 of the 120 bytes before

    offset  bytes  field of the stamp, which no two writes share
    0       8      time of the write in nanoseconds, big-endian
    8       8      token of the writer
    16      8      number of the write among those of its writer, big-endian

Both marks and the page are written in one call, in this order. A write that stopped halfway has changed
the first mark but not the last, so a slot with two equal marks contains one whole page. A lost index is
rebuilt from the marks. If pages are whole blocks, each mark has a block of its own, so that all three
can bypass the page cache.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import xxhash

from hicache_storage.backend_support.directory_tree import DirectoryTree, TreeKind
from hicache_storage.backend_support.filesystem import read_own
from hicache_storage.backend_support.writer_lock import TOKEN_NBYTES
from hicache_storage.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace

BLOCK_NBYTES = 4096
MARK_NBYTES = 128
STAMP_NBYTES = 24

_SLOT_FILE = re.compile(r"slots-[0-9]{4,}")
_INDEX_FILE = re.compile(r"index-[0-9a-f]{16}\.sqlite")
_INDEX_NAME = re.compile(rf"{_INDEX_FILE.pattern}(-wal|-shm|-journal)?")
_ROOT_ID = re.compile(r"[0-9a-f]{16}")

FILE_NBYTES = 1 << 30
_MAGIC = b"HiSl"
_VERSION = 1
_PREFIX = struct.Struct("<4sHBx16s")
_FIELDS = struct.Struct("<4sHBx16s24s64s8x")
_HASH_FIELD_NBYTES = 72
_STAMP = struct.Struct(f">Q{TOKEN_NBYTES}sQ")


class Layout(DirectoryTree):
    """The paths under one root. Immutable."""

    __slots__ = ("_root_id", "_server", "index", "lock")

    backend = "hf3fs"
    own_names = re.compile(r"root-id.*|lock|index[.-].*")
    kind = TreeKind(frozenset({"index.sqlite", "index.redis", "root-id", "lock"}), _SLOT_FILE)
    others: ClassVar[Mapping[str, TreeKind]] = {
        "file": TreeKind(frozenset({"usage", "survey"}), re.compile(r"[0-9a-f]{2}"))
    }

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._root_id = f"{root}/root-id"
        self._server = f"{root}/index.redis"
        self.lock = f"{root}/lock"
        self.index = f"{root}/index.sqlite"

    def require_index(self, *, redis: bool) -> None:
        """Refuse the other kind of index, because two indexes would give one slot to two pages.

        Raises:
            ConfigError: The pages are in an index of the other kind, or in both.
        """
        has_redis = os.path.lexists(self._server)
        has_sqlite = not has_redis and (os.path.lexists(self.index) or os.path.lexists(self.lock))
        has_redis = has_redis or os.path.lexists(self._root_id)
        if has_redis and has_sqlite:
            raise ConfigError(
                f"hf3fs: path: {self.root} has two indexes: end all engines; then remove index.sqlite"
                " and lock to go on with Redis, or root-id to go on with sqlite"
            )
        if has_sqlite if redis else has_redis:
            kind, names = ("sqlite", "index.sqlite and lock")
            if not redis:
                kind, names = "a Redis server", "index.redis and root-id"
            raise ConfigError(
                f"hf3fs: index: the index of {self.root} is {kind}: name that one; or end all"
                f" engines and remove {names}, then the new index is built from the pages"
            )

    def index_server(self) -> tuple[str, str] | None:
        """Return the place of the Redis index and its maker's token, or None if not recorded."""
        try:
            place, _, maker = (
                read_own(self._server, 1024).decode("utf-8", "replace").partition("\n")
            )
        except OSError:
            return None
        return place, maker

    def note_index_server(self, place: str, maker: str) -> None:
        """Record where the Redis index is. If the file system refuses, leave it unrecorded."""
        temporary = f"{self._server}-{secrets.token_hex(8)}"
        with suppress(OSError):
            try:
                with open(temporary, "x", encoding="utf-8") as file:
                    file.write(f"{place}\n{maker}")
                os.rename(temporary, self._server)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)

    def remove_slots(self, space_id: str, below: int | None = None) -> None:
        """Remove the slot files of a key space. `below`: only files with lower numbers.

        Raises:
            StorageUnavailable: One of the files belongs to another program.
            OSError: The file system refuses a step.
        """
        for entry in self.entries(self.space_dir(space_id), _SLOT_FILE):
            if not entry.is_file(follow_symlinks=False):
                raise self.left(entry.path)
            if below is None or int(entry.name.partition("-")[2]) < below:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def root_id(self, *, make: bool = True) -> str:
        """Return the name of this root, which is the same on every host. Make it if it is missing.

        Raises:
            ConfigError: The file contains something else, or is missing and `make` is False.
        """
        try:
            with open(self._root_id, encoding="latin-1") as file:
                found = file.read(1024)
        except FileNotFoundError:
            if not make:
                raise ConfigError(
                    f"hf3fs: index: {self._root_id} is missing: no engine has opened {self.root} with a"
                    " Redis index"
                ) from None
            self._make_root_id()
            return self.root_id()
        if not _ROOT_ID.fullmatch(found):
            raise ConfigError(
                f"hf3fs: path: {self._root_id} does not hold the id of a root: name another"
                " directory, or remove that file, then the index is rebuilt"
            )
        return found

    def index_file(self) -> str | None:
        """Return the path of the index, or None if there is none.

        Raises:
            StorageUnavailable: The name of the index leads to another program's file.
        """
        try:
            target = os.readlink(self.index)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise self._foreign_index() from None
        if not _INDEX_FILE.fullmatch(target) or os.path.islink(f"{self.root}/{target}"):
            raise self._foreign_index()
        return f"{self.root}/{target}"

    def new_index(self) -> str:
        """Return a path for an index that no index had before."""
        return f"{self.root}/index-{secrets.token_hex(8)}.sqlite"

    def name_index(self, path: str) -> None:
        """Make the file at `path` the index."""
        temporary = f"{self.index}.new"
        if os.path.islink(temporary):
            os.unlink(temporary)
        os.symlink(os.path.basename(path), temporary)
        os.rename(temporary, self.index)

    def remove_indexes(self) -> None:
        """Remove all our indexes, with the files that SQLite keeps next to them."""
        if self.index_file() is not None:
            os.unlink(self.index)
        for name in os.listdir(self.root):
            if _INDEX_NAME.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(f"{self.root}/{name}")

    def _make_root_id(self) -> None:
        temporary = f"{self._root_id}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "x", encoding="ascii") as file:
                file.write(secrets.token_hex(8))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was faster
                os.link(temporary, self._root_id)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _foreign_index(self) -> StorageUnavailable:
        return StorageUnavailable(
            f"hf3fs: {self.index} is not an index of hf3fs: name another directory as path, or move that"
            " file away"
        )


class Place(NamedTuple):
    """The slot of a page, and the stamp of the write that put the page there."""

    slot: int
    stamp: bytes


class MarkedPage(NamedTuple):
    """The page and the write that a mark names."""

    page_hash: str
    stamp: bytes


class Geometry:
    """The slots of one key space: sizes, offsets and marks. Immutable."""

    __slots__ = (
        "_id",
        "_prefixes",
        "is_blocks",
        "lead_nbytes",
        "nbytes",
        "shape",
        "slot_nbytes",
        "slots_per_file",
        "space",
        "tail_nbytes",
    )

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self._id = bytes.fromhex(space.id)
        self._prefixes: dict[int, bytes] = {}
        """The first fields of a mark, by the length of the page hash."""
        self.nbytes = space.stored_nbytes
        self.is_blocks = self.nbytes % BLOCK_NBYTES == 0
        """True if a page consists of whole blocks."""
        self.lead_nbytes = BLOCK_NBYTES if self.is_blocks else MARK_NBYTES
        bare_nbytes = self.lead_nbytes + self.nbytes + MARK_NBYTES
        self.slot_nbytes = -(-bare_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        self.slots_per_file = max(1, FILE_NBYTES // self.slot_nbytes)
        self.tail_nbytes = self.slot_nbytes - self.lead_nbytes - self.nbytes
        """The bytes from the end of the page to the end of the slot."""
        self.shape = self.lead_nbytes, self.nbytes, self.tail_nbytes

    @property
    def last_mark_offset(self) -> int:
        """The offset of the second mark in its slot."""
        return self.lead_nbytes + self.nbytes

    def position(self, slot: int) -> tuple[int, int]:
        """Return the number of the file that contains a slot, and the offset in that file."""
        file, index = divmod(slot, self.slots_per_file)
        return file, index * self.slot_nbytes

    def mark(self, page_hash: str, stamp: bytes) -> bytes:
        """Return the mark that proves that a slot contains this page, from this write."""
        digest = bytes.fromhex(page_hash)
        prefix = self._prefixes.get(len(digest))
        if prefix is None:
            prefix = _PREFIX.pack(_MAGIC, _VERSION, len(digest), self._id)
            self._prefixes[len(digest)] = prefix
        fields = prefix + stamp + digest.ljust(_HASH_FIELD_NBYTES, b"\0")
        return fields + xxhash.xxh3_64_digest(fields)[::-1]  # little-endian

    def read_mark(self, mark: bytes) -> MarkedPage | None:
        """Return the page and write that `mark` names, or None if it is not a mark of this space."""
        if len(mark) != MARK_NBYTES or not mark.startswith(_MAGIC):
            return None
        _, _, length, _, stamp, digest = _FIELDS.unpack_from(mark)
        page_hash = digest[:length].hex()
        return MarkedPage(page_hash, stamp) if mark == self.mark(page_hash, stamp) else None


def new_stamp(token: str, serial: int) -> bytes:
    """Return the stamp of a write that happens now."""
    return _STAMP.pack(time.time_ns(), bytes.fromhex(token), serial)


def writer_of(stamp: bytes) -> str:
    """Return the token of the writer that made a stamp."""
    token: bytes = _STAMP.unpack(stamp)[1]
    return token.hex()


def written_ns(stamp: bytes) -> int:
    """Return the time when a stamp was made."""
    return int(_STAMP.unpack(stamp)[0])
