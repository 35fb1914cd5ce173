from __future__ import annotations

import numpy as np
import pytest
from hicache_conformance.tools.content.cells import CELL_NBYTES, Identity, Origin, origins, stream
from hypothesis import given, settings
from hypothesis import strategies as st

IDENTITY = Identity.of("5a" * 16, "0123456789abcdef" * 4, 3)

identities = st.builds(
    Identity.of,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.binary(min_size=16, max_size=64).map(bytes.hex),
    st.integers(min_value=0, max_value=2**32 - 1),
)


@settings(deadline=None)  # The machine may be busy.
@given(identity=identities, number=st.integers(min_value=0, max_value=2**31))
def test_any_cell_alone_names_its_page_version_and_offset(identity: Identity, number: int) -> None:
    cell = stream(identity, number * CELL_NBYTES, CELL_NBYTES)

    assert [Origin(identity, number * CELL_NBYTES)] == origins(cell, 4)


@settings(deadline=None)  # The machine may be busy.
@given(
    shift=st.integers(min_value=0, max_value=500), nbytes=st.integers(min_value=64, max_value=300)
)
def test_a_cell_is_found_wherever_it_starts(shift: int, nbytes: int) -> None:
    assert [Origin(IDENTITY, shift)] == origins(stream(IDENTITY, shift, nbytes), 4)


@settings(deadline=None)  # The machine may be busy.
@given(bit=st.integers(min_value=0, max_value=8 * CELL_NBYTES - 1))
def test_a_cell_with_one_bit_flipped_names_nothing(bit: int) -> None:
    cell = stream(IDENTITY, 0, CELL_NBYTES)
    cell[bit // 8] ^= 1 << bit % 8

    assert [] == origins(cell, 4)


@settings(deadline=None)  # The machine may be busy.
@given(start=st.integers(min_value=0, max_value=2_000_000), nbytes=st.integers(0, 200))
def test_a_stream_is_the_same_wherever_reading_starts(start: int, nbytes: int) -> None:
    whole = stream(IDENTITY, start // 97, start - start // 97 + nbytes)

    assert np.array_equal(whole[whole.size - nbytes :], stream(IDENTITY, start, nbytes))


def test_there_is_nothing_in_front_of_a_page() -> None:
    assert 0 == stream(IDENTITY, -1, 100).size


def test_origins_come_in_the_order_of_their_bytes() -> None:
    other = Identity.of("5a" * 16, "fedcba9876543210" * 4)
    data = np.concatenate(
        [stream(IDENTITY, 0, 320), stream(other, 320, 64), stream(IDENTITY, 0, 64)]
    )

    assert [Origin(IDENTITY, 0), Origin(other, 0), Origin(IDENTITY, -384)] == origins(data, 8)


def test_no_more_origins_are_returned_than_requested() -> None:
    pages = [stream(Identity.of("5a" * 16, f"{number:032x}"), 0, 64) for number in range(20)]

    assert 8 == len(origins(np.concatenate(pages), 8))


@pytest.mark.parametrize("ids", [("5a", "00" * 32), ("5a" * 16, "xyz" * 12), ("5a" * 16, "")])
def test_an_id_that_is_no_hex_is_refused(ids: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"hex|base 16"):
        Identity.of(*ids)


@pytest.mark.parametrize("version", [-1, 2**32])
def test_a_version_beyond_32_bits_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=str(version)):
        Identity.of("5a" * 16, "00" * 32, version)
