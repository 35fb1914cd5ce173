"""Slots of `hf3fs`: a page needs two equal marks of its key space, and both data planes agree."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

import xxhash
from data_planes import compiled
from fuzz.choices import Choices
from fuzz.scratch import directory, write
from hicache_backends.hf3fs.layout import MARK_NBYTES, STAMP_NBYTES, Geometry, Layout, Place
from hicache_backends.hf3fs.slot_files import SlotFiles
from pages import hash_of, space

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.keys import check_page_hashes
from hicache_storage.native import HIT, WRONG, reference

_SPACE = space(page_nbytes=64)
_GEOMETRY = Geometry(_SPACE)
_LAST = _GEOMETRY.last_mark_offset
_HASHES = (hash_of(1), "cd" * 16, "ef" * 64)
_STAMPS = (bytes(STAMP_NBYTES), bytes(range(STAMP_NBYTES)))
_SEALED_NBYTES = MARK_NBYTES - 8
_READ = os.O_RDONLY | os.O_NOFOLLOW

SEEDS = (b"", *(bytes([n, n, 2, 1, n, 1, 5, n]) + bytes(range(30)) for n in range(8)))
TOKENS = (b"HiSl", b"\1")


@cache
def _files() -> SlotFiles:
    """Return the slot files of the store of this process."""
    files = SlotFiles(Layout(str(directory("slots"))), _GEOMETRY)
    Path(files.directory).mkdir(parents=True)
    return files


def check(data: bytes) -> None:
    choices = Choices(data)
    page_hash, stamp = choices.pick(_HASHES), choices.pick(_STAMPS)
    right = _GEOMETRY.mark(page_hash, stamp)
    marks = [_changed(right, choices) for _ in range(2)]
    if choices.flag():
        marks[1] = marks[0]
    lead, nbytes, tail = _GEOMETRY.shape
    body = bytes(range(nbytes))
    content = marks[0].ljust(lead, b"\0") + body + marks[1].ljust(tail, b"\0")
    content = content[: len(content) - choices.pick((0, 0, 0, 1, 4000, 4096))]

    files = _files()
    write(files.path(0), content)
    is_whole = len(content) == _GEOMETRY.slot_nbytes
    found = _GEOMETRY.read_mark(marks[0])
    if found is not None:
        check_page_hashes([found.page_hash])
        assert marks[0] == _GEOMETRY.mark(found.page_hash, found.stamp)
    newest = files.newest()
    if found is not None and marks[0] == marks[1] and is_whole:
        assert {found.page_hash: Place(0, found.stamp)} == newest
    else:
        assert {} == newest
    _check_reads(files, page_hash, stamp, marks, content)


def _check_reads(
    files: SlotFiles, page_hash: str, stamp: bytes, marks: list[bytes], content: bytes
) -> None:
    asked = _GEOMETRY.mark(page_hash, stamp)
    is_right = marks == [asked, asked]
    lead, nbytes, _ = _GEOMETRY.shape
    verdict = files.check({page_hash: Place(0, stamp)}, Deadline(60))[page_hash]
    assert verdict in (HIT, WRONG)
    assert verdict == WRONG or is_right
    found: list[object] = []
    for module in (reference, compiled or reference):
        piece = bytearray(nbytes)
        arguments = files.arguments([0], writing=False)
        verdicts, digests = module.read_slots(
            *arguments, [[piece]], [asked], _GEOMETRY.shape, 1, 1 << 20, b"", 0, math.inf
        )
        checked = module.check_slots(*arguments, [asked], _LAST, math.inf)
        if verdicts == [HIT]:
            assert is_right
            assert content[lead : lead + nbytes] == piece
            assert digests == [xxhash.xxh3_64_intdigest(piece)]
        assert verdicts[0] in (HIT, WRONG)
        assert is_right or verdicts == [WRONG]
        found.append((verdicts, digests, checked))
    assert found[0] == found[1]


def _changed(mark: bytes, choices: Choices) -> bytes:
    changed = bytearray(choices.patched(mark)[:MARK_NBYTES].ljust(MARK_NBYTES, b"\0"))
    if choices.flag():
        seal = xxhash.xxh3_64_digest(changed[:_SEALED_NBYTES])[::-1]
        changed[_SEALED_NBYTES:] = seal
    return bytes(changed)
