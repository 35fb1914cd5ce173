"""Page files of `file`: both data planes agree on a changed file, and accept no wrong page."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import xxhash
from data_planes import compiled
from fuzz.choices import Choices
from fuzz.scratch import directory, read, write
from hicache_backends.file.storage import FileStorage
from pages import hash_of, space

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.native import HIT, MISS, UNSYNCED, WRONG, reference
from hicache_storage.page import Page
from hicache_storage.page_store.begun import finish
from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.page_store.settings import PageStoreSettings
from hicache_storage.page_store.spaces import OpenSpaces
from hicache_storage.page_store.storage_calls import Lanes

_SPACE = space(page_nbytes=32, frame_nbytes=FRAME_NBYTES)
_STORED_NBYTES = _SPACE.stored_nbytes
_HASHES = (hash_of(1), hash_of(1)[:2] + hash_of(2)[2:])
_PAYLOAD = bytes(range(32))
_TRAILER_NBYTES, _SEALED_NBYTES = 64, 56

SEEDS = (b"", *(bytes([n, 2 * n, 1, n]) + bytes(range(60)) for n in range(8)))
TOKENS = (b"HiPg", b"HiKV")


def check(data: bytes) -> None:
    choices = Choices(data)
    store = _store()
    right = store.right
    changed = bytearray(choices.patched(right) if choices.integer(0, 3) else choices.rest())
    if choices.flag() and len(changed) >= _TRAILER_NBYTES:
        body = bytes(changed[-_TRAILER_NBYTES:][:_SEALED_NBYTES])
        changed[_SEALED_NBYTES - _TRAILER_NBYTES :] = xxhash.xxh3_64_digest(body)
    asked = choices.pick(_HASHES)
    path = f"{store.folder}/{asked}"
    write(path, changed)
    _check_planes_agree(os.fsencode(path), asked, bytes(changed), right[-_TRAILER_NBYTES:])
    page = _page(bytes(32))
    transfer = Transfer(_SPACE, [asked], [page])
    ((verdict,),) = finish(store.lanes.reads.move([(_SPACE, transfer)], Deadline(60))).verdicts
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - quicker than a Path

    assert verdict in (
        Verdict.OK,
        Verdict.MISS,
        Verdict.CORRUPT,
        Verdict.WRONG_KEY,
        Verdict.WRONG_SIZE,
    )
    if verdict is Verdict.OK:
        assert (_HASHES[0], _PAYLOAD) == (asked, page.tobytes())
        assert right[:_STORED_NBYTES] == changed[:_STORED_NBYTES]


@dataclass(frozen=True, slots=True)
class _Store:
    lanes: Lanes
    folder: str
    """Where the files of the pages lie."""
    right: bytes
    """The file of the page, as the store wrote it."""


@cache
def _store() -> _Store:
    """Return the store of this process, which is never closed, because it ends with the process."""
    root = directory("page-files")
    storage = FileStorage.from_config({"path": str(root)})
    storage.open_space(_SPACE)
    lanes = Lanes(OpenSpaces(storage), PageStoreSettings(parallelism=1))
    transfer = Transfer(_SPACE, [_HASHES[0]], [_page(_PAYLOAD)])
    saved = finish(lanes.writes.move([(_SPACE, transfer)], Deadline(60)))
    assert [[Verdict.OK]] == saved.verdicts
    folder = f"{root}/spaces/{_SPACE.id}/{_HASHES[0][:2]}"
    return _Store(lanes, folder, read(f"{folder}/{_HASHES[0]}"))


def _page(payload: bytes) -> Page:
    return Page(bytearray(payload))


def _check_planes_agree(path: bytes, asked: str, changed: bytes, trailer: bytes) -> None:
    name = trailer[:24] + xxhash.xxh3_128_digest(asked.encode())
    found: list[object] = []
    for module in (reference, compiled or reference):
        piece = bytearray(_STORED_NBYTES)
        verdicts, digests = module.read_files(
            [path], [name], [[piece]], _STORED_NBYTES, -1, 0, 0, math.inf
        )
        (checked,) = module.check_files([path], [name], _STORED_NBYTES, -1, math.inf)
        assert verdicts[0] in (HIT, MISS, WRONG)
        assert checked in (HIT, UNSYNCED, WRONG)
        if verdicts == [HIT]:
            seal = xxhash.xxh3_64_digest(changed[-_TRAILER_NBYTES:][:_SEALED_NBYTES])
            assert len(changed) == _STORED_NBYTES + _TRAILER_NBYTES
            assert (bytes(piece), seal) == (changed[:_STORED_NBYTES], changed[-8:])
            assert checked != WRONG
        found.append((verdicts, digests, checked, piece if verdicts == [HIT] else b""))
    assert found[0] == found[1]
