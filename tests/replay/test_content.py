"""The content of replayed pages: every byte is written, and every wrong byte is detected."""

from __future__ import annotations

import pytest
from pages import blank, hash_of, space

from hicache_storage.page import Page
from hicache_storage.replay.content import PageContent

_NBYTES = 1000


def _written(number: int = 1, **changes: object) -> bytearray:
    page = blank(_NBYTES)
    PageContent(space(page_nbytes=_NBYTES, **changes)).write(hash_of(number), page)
    return bytearray(page.tobytes())


def _content() -> PageContent:
    return PageContent(space(page_nbytes=_NBYTES))


def test_written_content_matches() -> None:
    assert _content().matches(hash_of(1), Page(_written()))
    assert not _content().matches(hash_of(2), Page(_written()))


def test_every_flipped_bit_is_detected() -> None:
    content, data = _content(), _written()
    page = Page(data)
    for number in range(8 * _NBYTES):
        data[number // 8] ^= 1 << number % 8
        assert not content.matches(hash_of(1), page), number
        data[number // 8] ^= 1 << number % 8


def test_the_content_is_the_same_in_every_segmentation() -> None:
    contiguous = _written()
    parts = [bytearray(length) for length in (1, 7, 8, 300, 684)]

    _content().write(hash_of(1), Page(*parts))

    assert b"".join(parts) == contiguous


def test_a_wrong_byte_in_the_last_segment_is_detected() -> None:
    data = _written()
    view = memoryview(data)
    data[-1] ^= 1

    assert not _content().matches(hash_of(1), Page(view[:400], view[400:]))


@pytest.mark.parametrize("shift", [1, 8, 64, 512])
def test_shifted_bytes_are_detected(shift: int) -> None:
    data = _written()

    assert not _content().matches(hash_of(1), Page(data[shift:] + data[:shift]))


def test_no_two_pages_share_a_word() -> None:
    words = [
        bytes(data[start : start + 8])
        for data in (_written(1), _written(2), _written(1, pool="draft"))
        for start in range(0, _NBYTES, 8)
    ]

    assert len(words) == len(set(words))


def test_one_byte_pages_work() -> None:
    content, page = PageContent(space(page_nbytes=1)), blank(1)

    content.write(hash_of(3), page)

    assert content.matches(hash_of(3), page)


def test_a_page_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="must have 1000 bytes, not 999"):
        _content().matches(hash_of(1), blank(999))
