from __future__ import annotations

import random
import time

import pytest
from hicache_conformance.tools.content.content import UNTOUCHED, PageRegistry, content, diagnose
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import hash_of, space

SPACE, OTHER_SPACE = space().id, space(pool="draft").id
PAGE, OTHER_PAGE = hash_of(1), hash_of(2)
N = 8192
RIGHT = content(SPACE, PAGE, N, 1)
LATER = content(SPACE, PAGE, N, 2)
ALIEN = content(OTHER_SPACE, OTHER_PAGE, N)
NOISE = random.Random(5).randbytes(N)


def blank(nbytes: int) -> bytes:
    return bytes([UNTOUCHED]) * nbytes


def diagnosed(received: bytes, *versions: int, nbytes: int | None = None) -> str:
    registry = PageRegistry()
    registry.add(OTHER_SPACE, OTHER_PAGE)
    for version in (1, 2):
        registry.add(SPACE, PAGE, version)
    expected = [(SPACE, PAGE, version) for version in versions or (1,)]
    return registry.diagnose(received, expected=expected, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", [1, 8, 31, 32, 33, 4096])
def test_the_right_page_is_recognised(nbytes: int) -> None:
    assert "the right page" == diagnosed(content(SPACE, PAGE, nbytes, 1))


def test_any_of_the_expected_pages_is_right() -> None:
    assert "the right page" == diagnosed(LATER, 1, 2)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        (bytes(N), "all zeros"),
        (blank(N), "untouched buffer"),
        (b"\x11" * N, "every byte is 0x11"),
        (RIGHT[:512] + bytes(N - 512), "all zeros from byte 512 on"),
        (RIGHT[:700] + blank(N - 700), "untouched buffer from byte 700 on"),
        (ALIEN, f"bytes of the page {OTHER_PAGE} of space {OTHER_SPACE}"),
        (LATER, "version 2"),
        (RIGHT[:4096] + LATER[4096:], "version 1 up to byte 4096, then version 2"),
        (content(SPACE, PAGE, N, 9), "version 9 (never set)"),
        (bytes(512) + RIGHT[512:], "all zeros up to byte 512, then the right bytes"),
        (
            RIGHT[:1024] + bytes(100) + RIGHT[1124:],
            "the right bytes up to byte 1024, then all zeros up to byte 1124, then the right bytes",
        ),
        (
            RIGHT[:2048] + ALIEN[2048:],
            f"bytes of the page {OTHER_PAGE} of space {OTHER_SPACE} from byte 2048 on",
        ),
    ],
)
def test_wrong_bytes_are_named(received: bytes, words: str) -> None:
    assert words == diagnosed(received)


def test_a_mix_of_two_versions_is_found_where_both_are_expected() -> None:
    received = RIGHT[:4096] + LATER[4096:]

    assert "version 1 up to byte 4096, then version 2" == diagnosed(received, 1, 2)


@pytest.mark.parametrize("shift", [1, 7, 32, 64, 4095])
def test_a_shift_to_the_front_is_measured(shift: int) -> None:
    words = diagnosed(RIGHT[shift:] + blank(shift))

    assert (
        f"the right bytes shifted by {shift} bytes (byte 0 holds what belongs at byte {shift})"
        in words
    )


@pytest.mark.parametrize("shift", [4, 7, 32, 64, 4095])
def test_a_shift_to_the_back_is_measured(shift: int) -> None:
    words = diagnosed(blank(shift) + RIGHT[:-shift])

    assert f"untouched buffer up to byte {shift}, then the right bytes shifted by {shift}" in words


@settings(deadline=None)  # The machine may be busy.
@given(bit=st.integers(min_value=0, max_value=8 * N - 1))
def test_a_flipped_bit_is_found(bit: int) -> None:
    received = bytearray(RIGHT)
    received[bit // 8] ^= 1 << bit % 8
    got, due = received[bit // 8], RIGHT[bit // 8]

    words = f"first differs at byte {bit // 8}: 0x{got:02x} instead of 0x{due:02x} (one bit)"

    assert words == diagnosed(bytes(received))


def test_scattered_differences_are_counted() -> None:
    received = bytearray(RIGHT)
    for place in range(17, N, 1000):
        received[place] ^= 0xFF

    assert diagnosed(bytes(received)).startswith("first differs at byte 17: ")
    assert diagnosed(bytes(received)).endswith("; 9 bytes differ in all")


def test_noise_in_the_middle_is_cut_out() -> None:
    words = diagnosed(RIGHT[:512] + NOISE[:200] + RIGHT[712:])

    shown = NOISE[:8].hex(" ")
    assert words == (
        f"the right bytes up to byte 512, then bytes of no known page ({shown} ...)"
        " up to byte 712, then the right bytes"
    )


def test_noise_is_of_no_known_page() -> None:
    assert f"bytes of no known page ({NOISE[:8].hex(' ')} ...)" == diagnosed(NOISE)


def test_only_the_first_of_many_parts_are_shown() -> None:
    pieces = [(RIGHT, LATER)[number % 2][512 * number :][:512] for number in range(16)]

    words = diagnosed(b"".join(pieces))

    assert words.startswith("version 1 up to byte 512, then version 2 up to byte 1024, then ")
    assert words.endswith(" up to byte 2048, and so on")


@pytest.mark.parametrize(
    ("received", "words"),
    [
        (RIGHT[:1000], "1000 bytes instead of 8192: the right bytes, cut short"),
        (RIGHT + bytes(10), "8202 bytes instead of 8192: all zeros from byte 8192 on"),
        (b"", "0 bytes instead of 8192: no bytes at all"),
        (LATER[:100], "100 bytes instead of 8192: version 2"),
    ],
)
def test_another_length_is_reported_first(received: bytes, words: str) -> None:
    assert words == diagnosed(received, nbytes=N)


@pytest.mark.parametrize("nbytes", [4, 8, 31])
def test_pages_shorter_than_a_cell_are_recognised_too(nbytes: int) -> None:
    assert "version 2" == diagnosed(LATER[:nbytes])
    assert f"bytes of the page {OTHER_PAGE} of space {OTHER_SPACE}" == diagnosed(ALIEN[:nbytes])


@pytest.mark.parametrize("nbytes", [1, 2, 3])
def test_bytes_too_few_to_identify_are_compared(nbytes: int) -> None:
    assert diagnosed(ALIEN[:nbytes]).startswith("first differs at byte 0: ")


def test_without_a_ledger_a_page_is_named_by_the_start_of_its_ids() -> None:
    words = diagnose(ALIEN, space_id=SPACE, page_hash=PAGE, allowed=[RIGHT])

    assert f"bytes of the page {OTHER_PAGE[:8]}... of space {OTHER_SPACE[:8]}..." == words


def test_where_a_miss_was_due_the_version_is_named() -> None:
    assert "version 2" == diagnose(LATER, space_id=SPACE, page_hash=PAGE, allowed=[])


def test_contents_that_are_not_made_of_cells_are_compared_all_the_same() -> None:
    allowed = [NOISE, NOISE[::-1]]
    received = NOISE[:5000] + bytes(N - 5000)

    words = diagnose(received, space_id=SPACE, page_hash=PAGE, allowed=allowed)

    assert "all zeros from byte 5000 on" == words


def test_a_memoryview_will_do() -> None:
    words = diagnose(memoryview(bytearray(LATER)), space_id=SPACE, page_hash=PAGE, allowed=[RIGHT])

    assert "version 2" == words


def test_nothing_expected_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="expected"):
        PageRegistry().diagnose(RIGHT, expected=[])


@pytest.mark.parametrize("kind", ["noise", "versions", "shift", "alien"])
def test_a_page_of_1_mib_is_diagnosed_at_once(kind: str) -> None:
    nbytes = 1 << 20
    page = content(SPACE, PAGE, nbytes, 1)
    received = {
        "noise": random.Random(1).randbytes(nbytes),
        "versions": page[: nbytes // 2] + content(SPACE, PAGE, nbytes, 2)[nbytes // 2 :],
        "shift": page[13:] + bytes(13),
        "alien": content(OTHER_SPACE, PAGE, nbytes),
    }[kind]

    started_s = time.process_time()
    diagnosed(received)

    assert time.process_time() - started_s < 0.1
