from __future__ import annotations

import ctypes
import itertools

import pytest
import xxhash
from pages import hash_of, page, space

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import CorruptPage
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store.frame import (
    FRAME_NBYTES,
    FramedPage,
    Framing,
    are_right,
    frame_nbytes,
    payload_checksums,
)

SPACE = space(page_nbytes=1000, frame_nbytes=FRAME_NBYTES)
PAGE_HASH = hash_of(7)


def framed(*, header_nbytes: int = FRAME_NBYTES, checksum: bool = True) -> FramedPage:
    """Return a page whose header was written over other bytes."""
    made = FramedPage(memoryview(bytearray(b"\xee" * header_nbytes)), page(1000))
    Framing(SPACE, checksum=checksum).write([made], [PAGE_HASH])
    return made


def check(key_space: KeySpace, made: FramedPage, page_hash: str, *, checksum: bool) -> None:
    """Raise an error unless the page passes as the page of `page_hash`."""
    for error in Framing(key_space, checksum=checksum).errors([made], [page_hash]).values():
        raise error


def reason_of(made: FramedPage, *, checksum: bool = True) -> str:
    """Return the reason why the check refuses `made`."""
    with pytest.raises(CorruptPage) as caught:
        check(SPACE, made, PAGE_HASH, checksum=checksum)
    return caught.value.reason


def test_a_header_has_these_bytes_for_ever() -> None:
    """The expected bytes are constants: stored pages outlive the program that wrote them."""
    made = framed()
    first = b"".join(
        [
            b"HiKV",
            (1).to_bytes(2, "little"),
            (1).to_bytes(2, "little"),
            (1000).to_bytes(8, "little"),
            xxhash.xxh3_64_intdigest(made.payload.tobytes()).to_bytes(8, "little"),
            bytes.fromhex(SPACE.id),
            b"\x20" + bytes.fromhex(PAGE_HASH) + bytes(71 - 32),
            bytes(8),
        ]
    )

    assert 120 == len(first)
    assert first + xxhash.xxh3_64_intdigest(first).to_bytes(8, "little") == bytes(made.header)
    assert "51859edbc6ab507d26c334a48f03bce5" == xxhash.xxh3_128_hexdigest(made.header)


@pytest.mark.parametrize("others", [[], [page(1000)]], ids=["alone", "beside one without digest"])
def test_a_header_takes_the_digest_that_its_page_has(others: list[Page]) -> None:
    hashed, *rest = [
        FramedPage(memoryview(bytearray(FRAME_NBYTES)), one) for one in (page(1000), *others)
    ]
    hashed.payload.digest = 7
    made = [hashed, *rest]
    Framing(SPACE, checksum=True).write(made, [PAGE_HASH] * len(made))

    assert (7).to_bytes(8, "little") == bytes(hashed.header[16:24])
    for one in rest:
        check(SPACE, one, PAGE_HASH, checksum=True)


def test_a_page_passes_under_its_own_key() -> None:
    check(SPACE, framed(), PAGE_HASH, checksum=True)


@pytest.mark.parametrize("digest_nbytes", [16, 20, 32, 64])
def test_a_hash_of_any_length_passes(digest_nbytes: int) -> None:
    made, page_hash = framed(), "ab" * digest_nbytes
    Framing(SPACE, checksum=True).write([made], [page_hash])

    check(SPACE, made, page_hash, checksum=True)
    with pytest.raises(CorruptPage, match="wrong_key"):
        check(SPACE, made, page_hash[:-2] + "ac", checksum=True)


@pytest.mark.parametrize("checksum", [True, False], ids=["xxh3", "none"])
def test_every_flipped_bit_of_a_header_is_found(*, checksum: bool) -> None:
    made = framed(checksum=checksum)
    for bit in range(8 * FRAME_NBYTES):
        made.header[bit // 8] ^= 1 << bit % 8
        assert "corrupt" == reason_of(made, checksum=checksum)
        made.header[bit // 8] ^= 1 << bit % 8

    check(SPACE, made, PAGE_HASH, checksum=checksum)


def test_every_flipped_bit_of_a_payload_is_found() -> None:
    made = framed()
    (payload,) = made.payload.segments
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        assert "corrupt" == reason_of(made)
        payload[bit // 8] ^= 1 << bit % 8

    check(SPACE, made, PAGE_HASH, checksum=True)


@pytest.mark.parametrize("byte", range(FRAME_NBYTES, 4096, 97))
def test_padding_after_an_aligned_header_must_be_zeros(byte: int) -> None:
    made = framed(header_nbytes=4096)
    check(SPACE, made, PAGE_HASH, checksum=True)
    made.header[byte] = 1

    assert "corrupt" == reason_of(made)


def test_another_hash_is_the_wrong_key() -> None:
    with pytest.raises(CorruptPage, match=f"wrong_key: .*{PAGE_HASH}"):
        check(SPACE, framed(), hash_of(8), checksum=True)


def test_a_hash_that_only_begins_alike_is_the_wrong_key() -> None:
    made = framed()
    Framing(SPACE, checksum=True).write([made], [PAGE_HASH[:32]])

    assert "wrong_key" == reason_of(made)


@pytest.mark.parametrize("other", [space(page_nbytes=1000), space(pool="draft", page_nbytes=1000)])
def test_another_key_space_is_the_wrong_key(other: KeySpace) -> None:
    with pytest.raises(CorruptPage, match="wrong_key"):
        check(other, framed(), PAGE_HASH, checksum=True)


def test_another_length_is_the_wrong_size() -> None:
    made = framed()
    shorter = FramedPage(made.header, Page(made.payload.segments[0][:-1]))

    assert "wrong_size" == reason_of(shorter)
    assert "wrong_size" == reason_of(shorter, checksum=False)


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0xEE])
def test_memory_that_was_never_a_header_is_corrupt(fill: int) -> None:
    made = framed()
    made.header[:] = bytes([fill]) * FRAME_NBYTES

    assert "corrupt" == reason_of(made)


def test_without_checksums_damage_to_a_payload_passes_and_identity_stays() -> None:
    made = framed(checksum=False)
    made.payload.segments[0][3] ^= 1

    check(SPACE, made, PAGE_HASH, checksum=False)
    with pytest.raises(CorruptPage, match="wrong_key"):
        check(SPACE, made, hash_of(8), checksum=False)


def test_a_page_without_checksum_is_refused_where_one_is_required() -> None:
    with pytest.raises(CorruptPage, match=r"corrupt: .*without a checksum"):
        check(SPACE, framed(checksum=False), PAGE_HASH, checksum=True)


def test_a_page_with_checksum_passes_where_none_is_required() -> None:
    made = framed(checksum=True)
    made.payload.segments[0][3] ^= 1

    check(SPACE, made, PAGE_HASH, checksum=False)


@pytest.mark.parametrize(
    ("alignment", "nbytes"), [(1, 128), (64, 128), (128, 128), (512, 512), (4096, 4096), (96, 192)]
)
def test_a_frame_is_rounded_up_to_the_alignment(alignment: int, nbytes: int) -> None:
    assert nbytes == frame_nbytes(alignment)


@pytest.mark.parametrize("cuts", [(0, 1000), (0, 1, 1000), (0, 500, 500, 1000), range(1001)])
def test_a_checksum_does_not_depend_on_the_segments(cuts: tuple[int, ...] | range) -> None:
    data = page(1000).tobytes()
    scattered = Page(*(data[start:end] for start, end in itertools.pairwise(cuts)))

    made = FramedPage(memoryview(bytearray(128)), scattered)

    assert xxhash.xxh3_64_intdigest(data) == payload_checksums([made])[0]


def test_a_revocable_of_one_move_is_not_that_of_the_payload() -> None:
    payload, revocable = page(1000), AtomicRevocable()
    made = FramedPage(memoryview(bytearray(128)), payload, revocable)
    revocable.revoke()

    assert payload.revocable is None
    assert revocable is made.stored.revocable
    assert [None] == payload_checksums([made])


def test_a_stored_page_borrows_header_and_payload() -> None:
    made = FramedPage(memoryview(bytearray(128)), Page(bytearray(3), bytearray(5)))
    made.stored.copy_from(bytes(range(128 + 8)))

    assert bytes(range(128)) == bytes(made.header)
    assert bytes(range(128, 136)) == made.payload.tobytes()
    assert [128, 3, 5] == [segment.nbytes for segment in made.stored.segments]
    address, nbytes = made.stored.addresses[0]
    assert bytes(range(128)) == ctypes.string_at(address, nbytes)


class TestAreRight:
    """The check of stored pages on their way out of a store."""

    def stored(self, *, digest_skip: int | None = FRAME_NBYTES) -> Page:
        page = framed().stored
        page.digest_skip = digest_skip
        return page

    def test_a_right_page_gets_its_digest(self) -> None:
        page = self.stored()

        assert [True] == are_right(SPACE, [PAGE_HASH], [page])
        assert framed().payload.nbytes == page.nbytes - FRAME_NBYTES
        assert page.digest is not None

    def test_a_page_in_one_segment_is_checked(self) -> None:
        page = Page(bytearray(self.stored().tobytes()))
        page.digest_skip = FRAME_NBYTES
        damaged = Page(bytearray(page.tobytes()[:-1] + b"\xff"))
        damaged.digest_skip = FRAME_NBYTES

        assert [True, False] == are_right(SPACE, [PAGE_HASH, PAGE_HASH], [page, damaged])

    def test_another_hash_is_wrong(self) -> None:
        assert [False] == are_right(SPACE, [hash_of(8)], [self.stored()])

    def test_a_digest_that_is_there_is_trusted(self) -> None:
        page = self.stored()
        page.digest = 1

        assert [False] == are_right(SPACE, [PAGE_HASH], [page])

    def test_without_digests_only_headers_are_checked(self) -> None:
        page = self.stored(digest_skip=None)
        page.segments[-1][-1] ^= 1

        assert [True] == are_right(SPACE, [PAGE_HASH], [page])

    def test_a_revoked_page_is_neither(self) -> None:
        page = self.stored()
        page.revocable = AtomicRevocable()
        page.revocable.revoke()

        assert [None] == are_right(SPACE, [PAGE_HASH], [page])
