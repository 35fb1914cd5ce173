"""The list of the oldest pages, which the processes of the `file` backend share."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest
from file_roots import SPACE, opened, put, there
from hicache_backends.file.layout import Layout
from hicache_backends.file.victims_file import Victim, VictimsFile
from pages import hash_of

if TYPE_CHECKING:
    from pathlib import Path


class TestList:
    @pytest.fixture
    def listed(self, tmp_path: Path) -> list[Victim]:
        layout = Layout.create(str(tmp_path))
        victims = [
            Victim(n, n + 1, f"{layout.spaces}/{SPACE.id}/{hash_of(n)[:2]}/{hash_of(n)}")
            for n in range(100)
        ]
        assert VictimsFile(layout).publish(victims, 5, 7, f"{tmp_path}/temp")
        return victims

    def test_no_two_take_the_same_and_the_order_is_kept(
        self, tmp_path: Path, listed: list[Victim]
    ) -> None:
        files = [VictimsFile(Layout(str(tmp_path))) for _ in range(2)]
        taken: list[Victim] = []
        while some := [victim for one in files for victim in one.take().victims]:
            taken += some

        assert listed == taken

    def test_a_process_that_was_stopped_while_it_took_victims_delays_no_other(
        self, tmp_path: Path, listed: list[Victim]
    ) -> None:
        holder = os.open(tmp_path / "survey" / "victims", os.O_RDWR)
        try:
            fcntl.flock(holder, fcntl.LOCK_EX)
            assert listed[:1] == VictimsFile(Layout(str(tmp_path))).take().victims[:1]
        finally:
            os.close(holder)

    @pytest.mark.parametrize(
        "line",
        [
            b"",
            b"\0" * 200,
            b"1 2 ../../../etc/passwd\n",
            b"1 2 " + SPACE.id.encode() + b"/ab/" + b"cd" * 32 + b"\n",
            b"99999999999999999999999 2 x\n",
            b"1 9999999999999999999 " + SPACE.id.encode() + b"/cd/" + b"cd" * 32 + b"\n",
        ],
    )
    def test_a_line_that_names_no_page_is_never_a_victim(
        self, tmp_path: Path, listed: list[Victim], line: bytes
    ) -> None:
        path = tmp_path / "survey" / "victims"
        path.write_bytes(path.read_bytes()[:32] + line)

        share = VictimsFile(Layout(str(tmp_path))).take()
        assert [] == share.victims
        assert share.scan is not None
        assert 0.0 == share.scan.left

    @pytest.mark.parametrize(
        ("content", "taken"), [(b"", 1), (b"notes", 0), (b"\0" * 40, 0)], ids=["", "text", "zeros"]
    )
    def test_an_empty_list_is_replaced_and_another_programs_file_is_not(
        self, tmp_path: Path, listed: list[Victim], content: bytes, taken: int
    ) -> None:
        """A file system may leave a renamed file empty after a loss of power."""
        path = tmp_path / "survey" / "victims"
        path.write_bytes(content)
        file = VictimsFile(Layout(str(tmp_path)))

        assert bool(taken) is file.publish(listed, 5, 7, f"{tmp_path}/temp")

        assert bool(taken) is (path.read_bytes() != content)
        assert listed[:taken] == file.take().victims[:1]

    def test_an_old_list_evicts_nothing_that_was_used_since(self, tmp_path: Path) -> None:
        with opened(tmp_path, 20) as storage:
            for number in range(21):
                put(storage, number)
        with opened(tmp_path, 20) as storage:
            put(storage, 1)
            put(storage, *range(30, 45))
            assert [1] == there(storage, range(1, 3))
