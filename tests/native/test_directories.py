"""Directories that are listed, and files that are looked at: the same verdicts of both data planes."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, LATE, MISS, reference

if TYPE_CHECKING:
    from pathlib import Path

SOON_S = 3600.0
PAGE = "ab" * 32

file_names = st.one_of(
    st.text("0123456789abcdef", min_size=31, max_size=33),
    st.text("0123456789abcdef", min_size=127, max_size=129),
    st.text("0123456789abcdefA.-", min_size=32, max_size=40).filter(lambda name: name.strip(".")),
)


@NEEDS_COMPILED
@settings(deadline=None)
@given(names=st.sets(file_names, max_size=8), kinds=st.lists(st.sampled_from("fdl"), min_size=8))
def test_lists_of_both_are_equal(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], kinds: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    for name, kind in zip(sorted(names), kinds, strict=False):
        if kind == "f":
            (folder / name).touch()
        elif kind == "d":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(folder)
    path = [os.fsencode(folder)]
    found = [module.list_directories(path) for module in (reference, compiled)]

    assert [HIT] == found[0][0] == found[1][0]
    assert sorted(found[0][1][0]) == sorted(found[1][1][0])


@pytest.mark.parametrize("module", BOTH)
class TestListDirectories:
    def test_each_directory_has_its_own_list(self, module: Any, tmp_path: Path) -> None:
        for number in range(3):
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / f"{number:02x}{PAGE}").touch()
        paths = [os.fsencode(tmp_path / str(number)) for number in range(3)]

        lists = [[f"{number:02x}{PAGE}"] for number in range(3)]
        assert ([HIT] * 3, lists) == module.list_directories(paths)

    def test_many_files_are_listed(self, module: Any, tmp_path: Path) -> None:
        names = {f"{number:064x}" for number in range(1000)}
        for name in names:
            (tmp_path / name).touch()
        (verdict,), (listed,) = module.list_directories([os.fsencode(tmp_path)])

        assert HIT == verdict
        assert sorted(names) == sorted(listed)

    def test_a_path_of_no_directory_is_a_miss(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        paths = [os.fsencode(tmp_path / name) for name in ("absent", "file", "link", "file/x")]

        assert ([MISS] * 4, [[]] * 4) == module.list_directories(paths)

    def test_a_name_that_is_too_long_is_an_error(self, module: Any, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path / ("x" * 300))

        assert ([-errno.ENAMETOOLONG], [[]]) == module.list_directories([path])

    @pytest.mark.parametrize("name", [b"", b"a\0b"])
    def test_a_value_that_is_no_path_is_refused(self, module: Any, name: bytes) -> None:
        with pytest.raises(ValueError, match="no path"):
            module.list_directories([name])


@pytest.mark.parametrize("module", BOTH)
def test_modes_are_those_of_links_themselves(module: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [tmp_path, tmp_path / "file", tmp_path / "link"]
    expected = [path.lstat().st_mode for path in paths]
    paths += [tmp_path / "absent", tmp_path / "file" / "x", tmp_path / ("x" * 300)]

    assert [*expected, 0, 0, -errno.ENAMETOOLONG] == module.modes_of(list(map(os.fsencode, paths)))
    with pytest.raises(ValueError, match="no path"):
        module.modes_of([b""])


@pytest.mark.parametrize("module", BOTH)
class TestStatFiles:
    def test_a_file_has_its_time_and_size(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(7))
        os.utime(path, ns=(5, 1_700_000_000_123_456_789))

        assert ([HIT], [1_700_000_000_123_456_789], [7]) == module.stat_files(
            [os.fsencode(path)], time.monotonic() + SOON_S
        )

    def test_a_path_of_no_file_is_a_miss(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        paths = [os.fsencode(path) for path in (tmp_path, tmp_path / "link", tmp_path / "absent")]
        by_s = time.monotonic() + SOON_S

        assert ([MISS] * 3, [0] * 3, [0] * 3) == module.stat_files(paths, by_s)

    def test_after_the_deadline_files_are_late(self, module: Any, tmp_path: Path) -> None:
        assert ([LATE], [0], [0]) == module.stat_files([os.fsencode(tmp_path)], 0.0)

    def test_a_value_that_is_no_path_is_refused(self, module: Any) -> None:
        with pytest.raises(ValueError, match="no path"):
            module.stat_files([b""], SOON_S)
