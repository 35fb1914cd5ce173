"""Frames, trailers and paths of both data planes: the same bytes and the same verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.native import HIT, WRONG, reference

SPACE_ID = bytes(range(16))
HASH = "ab" * 32

hashes = st.lists(st.binary(min_size=16, max_size=64).map(bytes.hex), max_size=6)
words = st.integers(0, 2**64 - 1)


@NEEDS_COMPILED
@given(directory=st.binary(max_size=40), prefix=st.binary(min_size=24, max_size=24), names=hashes)
def test_paths_and_names_of_both_are_equal(
    directory: bytes, prefix: bytes, names: list[str]
) -> None:
    wanted = reference.page_files(directory, prefix, names)

    assert wanted == compiled.page_files(directory, prefix, names)


@NEEDS_COMPILED
@given(
    names=st.lists(st.binary(min_size=40, max_size=41), max_size=4),
    synced=st.booleans(),
    token=st.binary(min_size=8, max_size=8),
    serial=st.integers(0, 2**56 - 9),
)
def test_trailers_of_both_are_equal(
    names: list[bytes],
    synced: bool,  # noqa: FBT001
    token: bytes,
    serial: int,
) -> None:
    serials = range(serial, serial + len(names))
    wanted = reference.page_trailers(names, synced, token, serials)

    assert wanted == compiled.page_trailers(names, synced, token, serials)


@NEEDS_COMPILED
@given(names=hashes, nbytes=words, checksum=words, size=st.sampled_from([128, 129, 512]))
def test_frames_of_both_are_equal(names: list[str], nbytes: int, checksum: int, size: int) -> None:
    written = list[list[bytearray]]()
    for checksums in ([checksum] * len(names), None):
        for module in (reference, compiled):
            headers = [bytearray(b"\xee" * size) for _ in names]
            module.write_frames(headers, names, SPACE_ID, nbytes, checksums)
            written.append(headers)

    assert written[0] == written[1]
    assert written[2] == written[3]


@NEEDS_COMPILED
@given(
    made=st.binary(min_size=16, max_size=64).map(bytes.hex),
    asked=st.binary(min_size=16, max_size=64).map(bytes.hex),
    bit=st.integers(-1, 8 * 256 - 1),
    has_checksum=st.booleans(),
)
def test_verdicts_on_frames_of_both_are_equal(
    made: str,
    asked: str,
    bit: int,
    has_checksum: bool,  # noqa: FBT001
) -> None:
    header = bytearray(256)
    reference.write_frames([header], [made], SPACE_ID, 1000, [7])
    if bit >= 0:
        header[bit // 8] ^= 1 << bit % 8
    arguments = ([header, header], [made, asked], SPACE_ID, 1000, [7, 7] if has_checksum else None)

    assert reference.check_frames(*arguments) == compiled.check_frames(*arguments)


@pytest.mark.parametrize("module", BOTH)
def test_a_frame_passes_under_its_own_fields_alone(module: Any) -> None:
    header = bytearray(128)
    module.write_frames([header], [HASH], SPACE_ID, 1000, [7])

    assert [HIT] == module.check_frames([header], [HASH], SPACE_ID, 1000, [7])
    assert [HIT] == module.check_frames([header], [HASH], SPACE_ID, 1000, None)
    assert [WRONG] == module.check_frames([header], ["cd" * 32], SPACE_ID, 1000, [7])
    assert [WRONG] == module.check_frames([header], [HASH], bytes(16), 1000, [7])
    assert [WRONG] == module.check_frames([header], [HASH], SPACE_ID, 1001, [7])
    assert [WRONG] == module.check_frames([header], [HASH], SPACE_ID, 1000, [8])


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "page_hash", ["", "ab" * 15, "ab" * 65, "ab" * 16 + "a", "AB" * 32, "../" * 16]
)
def test_a_malformed_hash_is_refused(module: Any, page_hash: str) -> None:
    with pytest.raises(ValueError, match="no page hash"):
        module.page_files(b"/d", bytes(24), [page_hash])
    with pytest.raises(ValueError, match="no page hash"):
        module.write_frames([bytearray(128)], [page_hash], SPACE_ID, 1, None)
    with pytest.raises(ValueError, match="no page hash"):
        module.check_frames([bytearray(128)], [page_hash], SPACE_ID, 1, None)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": [bytearray(127)]},
        {"headers": []},
        {"names": [HASH] * 2},
        {"space_id": bytes(15)},
        {"checksums": []},
    ],
)
def test_arguments_that_do_not_fit_are_refused(module: Any, wrong: dict[str, Any]) -> None:
    given_ = {
        "headers": [bytearray(128)],
        "names": [HASH],
        "space_id": SPACE_ID,
        "nbytes": 1,
        "checksums": [1],
        **wrong,
    }

    for function in (module.write_frames, module.check_frames):
        with pytest.raises(ValueError, match="do not fit together"):
            function(*given_.values())


@pytest.mark.parametrize("module", BOTH)
def test_trailers_and_prefixes_of_wrong_sizes_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="24 bytes"):
        module.page_files(b"/d", bytes(23), [HASH])
    for names, token, serials in (
        ([bytes(39)], bytes(8), [0]),
        ([bytes(40)], bytes(7), [0]),
        ([bytes(40)], bytes(8), []),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            module.page_trailers(names, False, token, serials)
