"""Slots: the compiled data plane and the one in Python give the same verdicts, bytes and files."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slot_files import (
    ALL,
    BLOCK_NBYTES,
    MARK_NBYTES,
    cut,
    files_of,
    mark_of,
    page_of,
    slot_of,
    soon,
)

from hicache_storage.native import HIT, LATE, WRONG, reference

LARGE_RUN_NBYTES = 8 << 20


def aligned(nbytes: int) -> memoryview:
    """Return memory that begins at a multiple of the block size."""
    return memoryview(mmap.mmap(-1, nbytes))


def direct_files_of(path: Path) -> tuple[str, list[bytes], int]:
    """Return a file opened with O_DIRECT, or skip the test if the file system can't do that."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    return files_of(path, os.O_RDWR | os.O_DIRECT)


shapes = st.tuples(
    st.sampled_from([MARK_NBYTES, BLOCK_NBYTES]), st.integers(0, 3000), st.integers(128, 300)
)
slots = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([""] * 4 + ["first", "last"])), max_size=8
)
cuts = st.lists(st.integers(0, 3000), max_size=40)


@NEEDS_COMPILED
@settings(max_examples=200, deadline=None)
@given(
    shape=shapes,
    slots=slots,
    at=cuts,
    skip=st.integers(-1, 200),
    file_nbytes=st.one_of(st.none(), st.integers(0, 20_000)),
    run_nbytes=st.sampled_from([1, 700, 10_000, LARGE_RUN_NBYTES]),
    late=st.booleans(),
    missing=st.booleans(),
)
@example((128, 1500, 128), [(0, ""), (1, "")], [*range(1200)], 3, None, 1 << 20, 0, 0)
def test_reads_of_both_are_equal(  # noqa: PLR0917 - Hypothesis passes them by name
    shape: tuple[int, int, int],
    slots: list[tuple[int, str]],
    at: list[int],
    skip: int,
    file_nbytes: int | None,
    run_nbytes: int,
    late: bool,  # noqa: FBT001
    missing: bool,  # noqa: FBT001
) -> None:
    size = sum(shape)
    deadline_s = 0.0 if late else soon()
    seen = list[Any]()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "slots"
        with path.open("wb") as file:
            for number, state in slots:
                os.pwrite(file.fileno(), slot_of(number, shape, wrong=state), number * size)
        if file_nbytes is not None:
            os.truncate(path, file_nbytes)
        files = (folder, [path.name.encode(), b"missing"], os.O_RDONLY)
        numbers = [int(missing and number == 2) for number, _ in slots]
        offsets = [number * size for number, _ in slots]
        marks = [mark_of(number) for number, _ in slots]
        for module in (reference, compiled):
            memory = [cut(shape[1], at) for _ in slots]
            verdicts, values = module.read_slots(
                files, numbers, offsets, memory, marks, shape, 1, run_nbytes, ALL, skip, deadline_s
            )
            hits = [
                b"".join(page) if verdict == HIT else b""
                for page, verdict in zip(memory, verdicts, strict=True)
            ]
            last_offset = shape[0] + shape[1]
            checks = module.check_slots(files, numbers, offsets, marks, last_offset, deadline_s)
            seen.append((verdicts, values, hits, checks))

    assert seen[0] == seen[1]
    for (number, _), verdict, value, hit in zip(slots, *seen[0][:3], strict=True):
        if verdict == HIT:
            assert page_of(number, shape[1]) == hit
            assert skip < 0 or xxhash.xxh3_64_intdigest(hit[skip:]) == value


@NEEDS_COMPILED
@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    numbers=st.lists(st.integers(0, 9), max_size=8, unique=True),
    at=cuts,
    run_nbytes=st.sampled_from([1, 700, 10_000, LARGE_RUN_NBYTES]),
    late=st.booleans(),
    read_only=st.booleans(),
)
@example((4096, 1500, 128), [0, 1, 2], [*range(1200)], LARGE_RUN_NBYTES, 0, 0)
def test_writes_of_both_are_equal(  # noqa: PLR0917 - Hypothesis passes them by name
    shape: tuple[int, int, int],
    numbers: list[int],
    at: list[int],
    run_nbytes: int,
    late: bool,  # noqa: FBT001
    read_only: bool,  # noqa: FBT001
) -> None:
    seen = list[Any]()
    for module in (reference, compiled):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "slots"
            path.touch()
            verdicts = module.write_slots(
                files_of(path, os.O_RDONLY if read_only else os.O_RDWR),
                [0] * len(numbers),
                [number * sum(shape) for number in numbers],
                [cut(shape[1], at, page_of(n, shape[1])) for n in numbers],
                [mark_of(number) for number in numbers],
                shape,
                1,
                run_nbytes,
                b"",
                0.0 if late else soon(),
            )
            seen.append((verdicts, path.read_bytes()))

    assert seen[0] == seen[1]
    for number in numbers if not late and not read_only else ():
        start = number * sum(shape)
        assert slot_of(number, shape) == seen[0][1][start : start + sum(shape)]


@pytest.mark.parametrize("module", BOTH)
def test_an_empty_batch_has_no_verdicts(module: Any) -> None:
    shape = (MARK_NBYTES, 10, MARK_NBYTES)

    none = ("/nowhere", list[bytes](), os.O_RDONLY)

    assert ([], []) == module.read_slots(none, [], [], [], [], shape, 1, 1, b"", 0, soon())
    assert [] == module.write_slots(none, [], [], [], [], shape, 1, 1, b"", soon())
    assert [] == module.check_slots(none, [], [], [], 138, soon())


@pytest.mark.parametrize("module", BOTH)
def test_large_pages_are_hashed_in_parts(module: Any, tmp_path: Path) -> None:
    shape = (BLOCK_NBYTES, 1_000_000, 4384)
    data = os.urandom(shape[1])
    source, target = cut(shape[1], [5, 400_000], data), cut(shape[1], [7, 300_001, 300_002])
    moved = (files_of(tmp_path / "slots"), [0], [BLOCK_NBYTES])
    proof = ([mark_of(1)], shape, 1, 256 << 10, ALL)

    assert [HIT] == module.write_slots(*moved, [source], *proof, soon())
    assert ([HIT], [xxhash.xxh3_64_intdigest(data[32:])]) == module.read_slots(
        *moved, [target], *proof, 32, soon()
    )
    assert data == b"".join(target)


@pytest.mark.parametrize("module", BOTH)
def test_only_aligned_memory_is_moved_around_the_page_cache(module: Any, tmp_path: Path) -> None:
    shape = (BLOCK_NBYTES, 2 * BLOCK_NBYTES, BLOCK_NBYTES)
    pages = [[aligned(shape[1])] for _ in range(4)]
    for number, (piece,) in enumerate(pages):
        piece[:] = page_of(number, shape[1])
    odd = aligned(shape[1] + 1)[1:]
    sources = [pages[0], pages[1], [odd], pages[3]]
    targets = [[aligned(BLOCK_NBYTES), aligned(BLOCK_NBYTES)] for _ in range(4)]
    marks = [mark_of(number) for number in range(4)]
    files = direct_files_of(tmp_path / "slots")
    place = (files, [0] * 4, [number * sum(shape) for number in range(4)])
    proof = (marks, shape, BLOCK_NBYTES, LARGE_RUN_NBYTES, ALL)
    written = module.write_slots(*place, sources, *proof, soon())
    read, values = module.read_slots(*place, targets, *proof, 0, soon())

    assert [HIT, HIT, -errno.EINVAL, HIT] == written
    assert [HIT, HIT, WRONG, HIT] == read
    assert 0 == values[2]
    for number in (0, 1, 3):
        assert page_of(number, shape[1]) == b"".join(targets[number])


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(("alone", "expected"), [(ALL, HIT), (b"", -errno.EFBIG)])
def test_slots_of_a_failed_call_are_moved_one_by_one_where_that_is_wanted(
    module: Any, tmp_path: Path, alone: bytes, expected: int
) -> None:
    """The limit on file sizes is inside the second slot, so writes fail there."""
    shape = (MARK_NBYTES, 256, MARK_NBYTES)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (sum(shape) + 100, hard))
        verdicts = module.write_slots(
            files_of(tmp_path / "slots"),
            [0, 0],
            [0, sum(shape)],
            [[page_of(0, 256)], [page_of(1, 256)]],
            [mark_of(0), mark_of(1)],
            shape,
            1,
            LARGE_RUN_NBYTES,
            alone,
            soon(),
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with suppress(TypeError):
            signal.signal(signal.SIGXFSZ, handler)

    assert [expected, -errno.EFBIG] == verdicts


@pytest.mark.parametrize("module", BOTH)
def test_after_the_deadline_no_file_is_touched(module: Any, tmp_path: Path) -> None:
    shape = (MARK_NBYTES, 10, MARK_NBYTES)
    place = (files_of(tmp_path / "slots"), [0], [0])
    proof = ([mark_of(0)], shape, 1, 100, b"")

    assert [LATE] == module.check_slots(*place, [mark_of(0)], 138, 0.0)
    assert [LATE] == module.write_slots(*place, [[bytes(10)]], *proof, 0.0)
    assert ([LATE], [0]) == module.read_slots(*place, [[bytearray(10)]], *proof, 0, 0.0)
    assert not (tmp_path / "slots").exists()


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("kind", "expected"), [("file", errno.ELOOP), ("directory", errno.ENOTDIR)]
)
def test_a_link_is_not_followed(module: Any, tmp_path: Path, kind: str, expected: int) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "slots").write_bytes(bytes(300))
    (tmp_path / "link").symlink_to(tmp_path / "there", target_is_directory=True)
    (tmp_path / "slots").symlink_to(tmp_path / "there" / "slots")
    path = tmp_path / "slots" if kind == "file" else tmp_path / "link" / "slots"

    assert [-expected] == module.check_slots(files_of(path), [0], [0], [mark_of(0)], 138, soon())


@pytest.mark.parametrize("module", BOTH)
def test_slots_of_many_files_are_moved_in_one_call_and_every_file_is_closed(
    module: Any, tmp_path: Path
) -> None:
    shape = (MARK_NBYTES, 10, MARK_NBYTES)
    files = (str(tmp_path), [b"first", b"second", b"third"], os.O_RDWR | os.O_CREAT)
    place = (files, [2, 0, 1, 0], [0, 0, 0, sum(shape)])
    pages = [page_of(number, 10) for number in range(4)]
    proof = ([mark_of(number) for number in range(4)], shape, 1, 10_000, b"")
    before = sorted(Path("/proc/self/fd").iterdir())

    assert [HIT] * 4 == module.write_slots(*place, [[page] for page in pages], *proof, soon())
    read = [[bytearray(10)] for _ in pages]
    assert [HIT] * 4 == module.read_slots(*place, read, *proof, -1, soon())[0]

    assert pages == [bytes(page) for (page,) in read]
    assert before == sorted(Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": []},
        {"numbers": [1]},
        {"numbers": [-1]},
        {"files": ("/nowhere", [b""], 0)},
        {"files": ("/nowhere", [b"a\0b"], 0)},
        {"offsets": [0, 1]},
        {"pages": [[bytearray(9)]]},
        {"pages": []},
        {"marks": [b""]},
        {"marks": [bytes(257)]},
        {"shape": (64, 10, 200)},
        {"shape": (0, 10, 200)},
        {"shape": (200, 10, -1)},
        {"alignment": 0},
        {"alignment": 4096},
        {"run_nbytes": 0},
    ],
)
def test_batches_that_do_not_fit_are_refused(module: Any, wrong: dict[str, Any]) -> None:
    given = {
        "files": ("/nowhere", [b"slots"], 0),
        "numbers": [0],
        "offsets": [0],
        "pages": [[bytearray(10)]],
        "marks": [mark_of(0)],
        "shape": (MARK_NBYTES, 10, MARK_NBYTES),
        "alignment": 1,
        "run_nbytes": 100,
        **wrong,
    }

    with pytest.raises(ValueError, match="fit together"):
        module.write_slots(*given.values(), b"", soon())
    with pytest.raises(ValueError, match="fit together"):
        module.read_slots(*given.values(), b"", -1, soon())


@pytest.mark.parametrize("module", BOTH)
def test_pages_in_read_only_memory_are_not_read_into(module: Any, tmp_path: Path) -> None:
    shape = (MARK_NBYTES, 10, MARK_NBYTES)
    place = (files_of(tmp_path / "slots"), [0], [0])
    proof = ([mark_of(0)], shape, 1, 100, b"")
    assert [HIT] == module.write_slots(*place, [[b"0123456789"]], *proof, soon())
    with pytest.raises((BufferError, TypeError, ValueError)):
        module.read_slots(*place, [[b"0123456789"]], *proof, -1, soon())
