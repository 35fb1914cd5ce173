"""The format of a page's file."""

from __future__ import annotations

import pytest
from fsspec_stores import SPACE, A, B
from hicache_backends.fsspec.layout import TRAILER_NBYTES, pack_page, unpack_page
from pages import page, space

from hicache_storage.page import Page


class TestPageObject:
    def test_it_holds_the_page_and_a_trailer(self) -> None:
        data = pack_page(page(seed=1), SPACE.id, A)

        assert len(data) == SPACE.stored_nbytes + TRAILER_NBYTES
        assert bytes(unpack_page(data, SPACE.id, A) or b"") == page(seed=1).tobytes()

    def test_segments_make_no_difference(self) -> None:
        whole = page(seed=1).tobytes()
        parts = Page(bytearray(whole[:7]), bytearray(whole[7:]))

        assert pack_page(parts, SPACE.id, A) == pack_page(page(seed=1), SPACE.id, A)

    def test_another_page_is_not_taken_for_it(self) -> None:
        data = pack_page(page(), SPACE.id, A)

        assert unpack_page(data, SPACE.id, B) is None
        assert unpack_page(data, space(pool="draft").id, A) is None

    @pytest.mark.parametrize("nbytes", [0, 1, TRAILER_NBYTES, 2000])
    def test_a_part_of_it_is_no_page(self, nbytes: int) -> None:
        assert unpack_page(pack_page(page(), SPACE.id, A)[:nbytes], SPACE.id, A) is None

    @pytest.mark.parametrize("offset", [0, 2048, 4095, 4096, 4100, 4102, 4110, 4127])
    def test_a_flipped_bit_is_no_page(self, offset: int) -> None:
        data = bytearray(pack_page(page(), SPACE.id, A))
        data[offset] ^= 1

        assert unpack_page(bytes(data), SPACE.id, A) is None

    def test_half_of_one_and_half_of_another_write_are_no_page(self) -> None:
        one, other = (pack_page(page(seed=seed), SPACE.id, A) for seed in (1, 2))

        assert unpack_page(one[:2048] + other[2048:], SPACE.id, A) is None
