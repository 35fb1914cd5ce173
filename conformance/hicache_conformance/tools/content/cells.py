"""Page bytes made of cells: each cell of 32 bytes names its page, version and offset.

A cell is a record that a small Feistel network has scrambled, so it can be decoded. No byte of a
cell is constant, no two cells are equal, and a cell with a changed bit is not valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import xxhash

if TYPE_CHECKING:
    import numpy.typing as npt

    Octets: TypeAlias = npt.NDArray[np.uint8]
    Words: TypeAlias = npt.NDArray[np.uint64]
    Flags: TypeAlias = npt.NDArray[np.bool_]

CELL_NBYTES = 32
_CHUNK_CELLS = 1 << 14  # So the arrays of a chunk fit into the processor's cache.
_WORD = np.dtype("<u8")
_ODD = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SALTS = tuple(np.uint64(xxhash.xxh3_64_intdigest(b"cell", seed)) for seed in range(5))
_MAX_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Identity:
    """One version of one page."""

    tag: int
    """64 bits of hash over the space's id and the page's hash."""
    page: int
    """The first 32 bits of the page hash."""
    space: int
    """The first 32 bits of the space's id."""
    version: int

    @classmethod
    def of(cls, space_id: str, page_hash: str, version: int = 0) -> Self:
        """Return the identity of a version of a page.

        Raises:
            ValueError: An id is not hex text of 8 digits or more, or the version does not fit 32
                bits.
        """
        if not 0 <= version <= _MAX_U32:
            raise ValueError(f"a version is a number from 0 to {_MAX_U32}, not {version}")
        tag = xxhash.xxh3_64_intdigest(f"{space_id}/{page_hash}".encode())
        return cls(tag, _first_word(page_hash), _first_word(space_id), version)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where bytes come from: position p of a buffer holds what belongs at p + `shift` of the page."""

    identity: Identity
    shift: int


def stream(identity: Identity, start: int, nbytes: int) -> Octets:
    """Return the bytes [start, start + nbytes) of a page, or nothing if `start` is negative."""
    if start < 0:
        return np.empty(0, dtype=np.uint8)
    first, skipped = divmod(start, CELL_NBYTES)
    count = -(-(skipped + nbytes) // CELL_NBYTES)
    cells = np.empty((count, 4), dtype=_WORD)
    for low in range(0, count, _CHUNK_CELLS):
        _fill(cells[low : low + _CHUNK_CELLS], identity, first + low)
    return cells.reshape(-1).view(np.uint8)[skipped : skipped + nbytes]


def origins(data: Octets, limit: int) -> list[Origin]:
    """Return up to `limit` different origins of the cells in `data`, in order, at any alignment."""
    found, valid = _origins_at(data, 0, limit)
    if not valid.all():
        for alignment in _alignments(data, valid):
            found += _origins_at(data, alignment, limit)[0]
    return list(dict.fromkeys(found))[:limit]


# --- encoding ------------------------------------------------------------------------------------


def _fill(cells: Words, identity: Identity, first: int) -> None:
    """Write the cells of a page from number `first` on."""
    places = np.arange(first, first + len(cells), dtype=np.uint64)
    places += np.uint64(identity.version << 32)
    right = places ^ _tag_mask(identity.tag)
    left = _mixed(right, 1) ^ np.uint64(identity.tag)
    right ^= _mixed(left, 2)
    names = _mixed(left + right, 3) ^ np.uint64(identity.space << 32 | identity.page)
    cells[:, 0] = left
    cells[:, 1] = right
    cells[:, 2] = names
    cells[:, 3] = _check(left, right, names)


def _mixed(words: Words, salt: int) -> Words:
    """Return a hash of each word."""
    mixed = words + _SALTS[salt]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _ODD[0]
    mixed ^= mixed >> np.uint64(29)
    mixed *= _ODD[1]
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _check(left: Words, right: Words, names: Words) -> Words:
    return _mixed(right * _ODD[0] + left + names, 4)


@lru_cache(maxsize=1024)
def _tag_mask(tag: int) -> np.uint64:
    return np.uint64(_mixed(np.array([tag], dtype=np.uint64), 0)[0])


def _first_word(hex_text: str) -> int:
    if len(hex_text) < 8:
        raise ValueError(f"an id has 8 hex digits or more; {hex_text!r} has {len(hex_text)}")
    return int(hex_text[:8], 16)


# --- decoding ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cells:
    """Decoded cells. The fields of a cell that is not valid mean nothing."""

    valid: Flags
    tags: Words
    names: Words
    places: Words

    @classmethod
    def read(cls, data: Octets) -> _Cells:
        """Decode `data`, whose length is a multiple of the cell's length."""
        left, right, names, check = data.view(_WORD).reshape(-1, 4).T.astype(np.uint64)
        inner = right ^ _mixed(left, 2)
        tags = left ^ _mixed(inner, 1)
        return cls(
            valid=check == _check(left, right, names),
            tags=tags,
            names=names ^ _mixed(left + right, 3),
            places=inner ^ _mixed(tags, 0),
        )

    def origin(self, number: int, position: int) -> Origin:
        """Return the origin of cell `number`, which starts at byte `position`."""
        version, index = divmod(int(self.places[number]), 1 << 32)
        space, page = divmod(int(self.names[number]), 1 << 32)
        identity = Identity(int(self.tags[number]), page, space, version)
        return Origin(identity, index * CELL_NBYTES - position)

    def changes(self) -> npt.NDArray[np.intp]:
        """Return the numbers of valid cells that do not continue the valid cell before them."""
        numbers = np.flatnonzero(self.valid)
        tags, places = self.tags[numbers], self.places[numbers]
        same = np.diff(places) == np.diff(numbers).astype(np.uint64)
        same &= tags[1:] == tags[:-1]
        return numbers[np.flatnonzero(np.concatenate(([True], ~same)))] if numbers.size else numbers


def _origins_at(data: Octets, alignment: int, limit: int) -> tuple[list[Origin], Flags]:
    """Return the origins of the cells that start at `alignment`, and which of the cells are valid."""
    found: dict[Origin, None] = {}
    valid = [np.empty(0, dtype=np.bool_)]
    step = _CHUNK_CELLS * CELL_NBYTES
    end = alignment + (data.size - alignment) // CELL_NBYTES * CELL_NBYTES
    for low in range(alignment, end, step):
        cells = _Cells.read(data[low : min(low + step, end)])
        valid.append(cells.valid)
        for number in cells.changes()[: 4 * limit].tolist():
            if len(found) < limit:
                found[cells.origin(number, low + number * CELL_NBYTES)] = None
    return list(found), np.concatenate(valid)


def _alignments(data: Octets, valid: Flags, samples: int = 64) -> list[int]:
    """Return other alignments of cells, tried at `samples` of the places without a valid cell."""
    numbers = np.flatnonzero(~valid)
    numbers = numbers[(numbers + 2) * CELL_NBYTES - 1 <= data.size]
    numbers = numbers[:: max(1, numbers.size // samples)]
    if not numbers.size:
        return []
    shifts = np.arange(1, CELL_NBYTES)
    starts = (numbers * CELL_NBYTES + shifts[:, None]).reshape(-1)
    windows = np.lib.stride_tricks.sliding_window_view(data, CELL_NBYTES)[starts]
    hits = _Cells.read(windows.reshape(-1)).valid.reshape(len(shifts), -1).any(axis=1)
    return [int(shift) for shift in shifts[hits]]
