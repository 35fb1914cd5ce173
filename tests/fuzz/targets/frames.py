"""Page frames: no changed frame or payload passes for the page, and both data planes agree on each."""

from __future__ import annotations

import xxhash
from data_planes import compiled
from fuzz.choices import Choices
from pages import hash_of, space

from hicache_storage.native import HIT, reference
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage, Framing

_SPACES = (space(page_nbytes=48), space(page_nbytes=48, tenant="b"))
_HASHES = (hash_of(1), hash_of(2), hash_of(1)[:32], "ab" * 64)
_SEALED_NBYTES = FRAME_NBYTES - 8
_UNCHECKED = (*range(6, 8), *range(16, 24), *range(_SEALED_NBYTES, FRAME_NBYTES))
"""The bytes of a frame that mean nothing without checksums, and the seal that covers them."""

SEEDS = (b"", bytes(8), *(bytes([n, 0, n, n]) + bytes(range(40)) for n in range(6)))
TOKENS = (b"HiKV",)


def check(data: bytes) -> None:
    choices = Choices(data)
    checksum = choices.integer(0, 3) > 0
    key_space, page_hash = choices.pick(_SPACES), choices.pick(_HASHES)
    asked_space, asked_hash = choices.pick(_SPACES), choices.pick(_HASHES)
    size = choices.pick((FRAME_NBYTES, 2 * FRAME_NBYTES))
    header, payload = bytearray(size), choices.chunk(48).ljust(48, b"\x11")
    page = FramedPage(memoryview(header), Page(payload))
    Framing(key_space, checksum=checksum).write([page], [page_hash])

    stored = bytearray(choices.patched(bytes(header))[:size].ljust(size, b"\0"))
    if choices.flag():
        stored[_SEALED_NBYTES:FRAME_NBYTES] = xxhash.xxh3_64_digest(stored[:_SEALED_NBYTES])[::-1]
    body = choices.patched(payload)[:48].ljust(48, b"\0")
    found = FramedPage(memoryview(stored), Page(body))
    errors = Framing(asked_space, checksum=checksum).errors([found], [asked_hash])
    _check_planes_agree(stored, asked_hash, bytes.fromhex(asked_space.id), body, checksum=checksum)
    _check_malformed_hash(choices.text(70))
    if errors:
        assert errors[0].reason in ("corrupt", "wrong_key", "wrong_size")
        return

    assert (key_space, page_hash) == (asked_space, asked_hash)
    if checksum:
        assert (bytes(header), payload) == (bytes(stored), body)
    for at in set(range(size)).difference(_UNCHECKED):
        assert header[at] == stored[at]


def _check_planes_agree(
    header: bytearray, page_hash: str, space_id: bytes, body: bytes, *, checksum: bool
) -> None:
    checksums = [xxhash.xxh3_64_intdigest(body)] if checksum else None
    arguments = ([header], [page_hash], space_id, len(body), checksums)
    wanted = reference.check_frames(*arguments)

    assert compiled is None or wanted == compiled.check_frames(*arguments)
    if wanted == [HIT] and checksums is not None:
        again = bytearray(len(header))
        reference.write_frames([again], [page_hash], space_id, len(body), checksums)
        assert header == again


def _check_malformed_hash(page_hash: str) -> None:
    """Assert that both data planes agree on a text that is not a page hash."""
    verdicts: list[bool] = []
    for module in (reference, compiled or reference):
        try:
            module.check_frames([bytes(FRAME_NBYTES)], [page_hash], bytes(16), 1, None)
        except ValueError:
            verdicts.append(False)
        else:
            verdicts.append(True)
    assert verdicts[0] == verdicts[1]
