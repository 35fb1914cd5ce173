"""Small files that processes change under a lock: the same verdicts and bytes of both data planes."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pytest
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, LATE, MISS, WRONG, reference

MAGIC = b"HiVictim"
LINES = [b"1 first\n", b"2 second\n", b"3 third\n"]


def list_of(lines: bytes, taken: int = 0, magic: bytes = MAGIC) -> bytes:
    return struct.pack("<8sQ16s", magic, taken, b"begun and took") + lines


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    record=st.one_of(
        st.binary(max_size=20),
        st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)).map(
            lambda t: struct.pack("<QQ", *t)
        ),
    ),
    added=st.integers(0, 2**40),
    removed=st.integers(0, 2**62),
)
def test_changes_of_totals_of_both_are_equal(record: bytes, added: int, removed: int) -> None:
    found = list[Any]()
    for module in (reference, compiled):
        with TemporaryFile() as anonymous, TemporaryDirectory() as folder:
            path = Path(folder) / "usage"
            path.write_bytes(record)
            with path.open("r+b") as file:
                verdict, *totals = module.change_totals(file.fileno(), added, removed, 0.0)
            found.append((verdict, totals if verdict == HIT else [], path.read_bytes()))
            assert MISS == module.change_totals(anonymous.fileno(), added, removed, 0.0)[0]

    assert found[0] == found[1]


@pytest.mark.parametrize("module", BOTH)
def test_totals_whose_lock_is_held_are_late_and_as_they_were(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(struct.pack("<QQ", 10, 4))
    with path.open("r+b") as holder, path.open("r+b") as file:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert LATE == module.change_totals(file.fileno(), 1, 1, 0.001)[0]
        fcntl.flock(holder, fcntl.LOCK_UN)

        assert (HIT, 11, 5) == module.change_totals(file.fileno(), 1, 1, 0.001)
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    lines=st.lists(
        st.one_of(st.binary(max_size=40), st.integers(250, 262).map(bytes)), max_size=12
    ).map(b"\n".join),
    taken=st.one_of(st.integers(0, 600), st.integers(0, 2**64 - 1)),
    magic=st.sampled_from([MAGIC, MAGIC, b"HiOthers"]),
    cut=st.one_of(st.none(), st.integers(0, 40)),
    bounds=st.tuples(st.integers(1, 300), st.integers(0, 6), st.integers(1, 12)),
)
def test_lines_that_both_take_are_equal(
    lines: bytes, taken: int, magic: bytes, cut: int | None, bounds: tuple[int, int, int]
) -> None:
    found = list[Any]()
    for module in (reference, compiled):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "list"
            path.write_bytes(list_of(lines, taken, magic)[:cut])
            verdict, *rest = module.take_lines(str(path), MAGIC, *bounds, 0.0)
            found.append((verdict, rest if verdict == HIT else [], path.read_bytes()))

    assert found[0] == found[1]


@pytest.mark.parametrize("module", BOTH)
class TestTakeLines:
    def test_no_line_is_taken_twice(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "list"
        path.write_bytes(list_of(b"".join(LINES)))
        taken = [module.take_lines(str(path), MAGIC, 1 << 20, 2, 9, 0.0)[3] for _ in range(3)]

        assert [LINES[0] + LINES[1], LINES[2], b""] == taken

    def test_a_share_of_what_is_left_is_taken(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "list"
        path.write_bytes(list_of(b"x\n" * 100))
        taken = [len(module.take_lines(str(path), MAGIC, 20, 0, 9, 0.0)[3]) for _ in range(3)]

        assert [18, 18, 18] == taken
        assert 2 == len(module.take_lines(str(path), MAGIC, 1 << 20, 0, 9, 0.0)[3])

    def test_the_header_holds_the_remaining_lines(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "list"
        path.write_bytes(list_of(b"".join(LINES)))
        verdict, header, end, _ = module.take_lines(str(path), MAGIC, 1 << 20, 1, 9, 0.0)

        assert (HIT, path.stat().st_size) == (verdict, end)
        assert list_of(b"", 32 + len(LINES[0])) == header == path.read_bytes()[:32]

    def test_a_line_that_is_too_long_is_not_taken(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "list"
        path.write_bytes(list_of(LINES[0] + b"x" * 256 + b"\n"))
        taken = [module.take_lines(str(path), MAGIC, 1, 9, 9, 0.0)[3] for _ in range(2)]

        assert [LINES[0], b""] == taken

    def test_a_lock_that_is_held_is_not_waited_for(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "list"
        path.write_bytes(list_of(b"".join(LINES)))
        with path.open("rb") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)

            assert LINES[0] == module.take_lines(str(path), MAGIC, 1 << 20, 1, 9, 0.001)[3]

    def test_a_foreign_list_is_left_as_it_is(self, module: Any, tmp_path: Path) -> None:
        foreign, link, pipe = tmp_path / "foreign", tmp_path / "link", tmp_path / "pipe"
        foreign.write_bytes(b"notes of another program, longer than a header")
        link.symlink_to(foreign)
        os.mkfifo(pipe)
        paths = [foreign, link, pipe, tmp_path / "absent"]

        assert [WRONG, -errno.ELOOP, -errno.EINVAL, -errno.ENOENT] == [
            module.take_lines(str(path), MAGIC, 1, 1, 1, 0.0)[0] for path in paths
        ]
        assert foreign.read_bytes().startswith(b"notes")

    @pytest.mark.parametrize(
        ("magic", "share_nbytes", "most"), [(b"short", 1, 1), (MAGIC, 0, 1), (MAGIC, 1, 0)]
    )
    def test_arguments_that_do_not_fit_are_refused(
        self, module: Any, tmp_path: Path, magic: bytes, share_nbytes: int, most: int
    ) -> None:
        with pytest.raises(ValueError, match="do not fit together"):
            module.take_lines(str(tmp_path), magic, share_nbytes, 1, most, 0.0)
