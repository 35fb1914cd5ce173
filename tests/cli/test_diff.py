"""`hicache diff`: it names the pages that only one of two stores has, and those that are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, CliStore, run_json, save
from composed_stores import file_member
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from servers import free_port
from stores import HookedStorage

from hicache_storage.cli import main
from hicache_storage.cli.operations.copying import copy
from hicache_storage.cli.operations.difference import compare, select_pairs
from hicache_storage.cli.operations.rate_limit import RateLimit
from hicache_storage.cli.operations.selection import SpaceSelection
from hicache_storage.cli.progress import Meter
from hicache_storage.storage import Capabilities

PAIRS = [("file", "redis"), ("redis", "s3"), ("s3", "hf3fs"), ("hf3fs", "file")]


def _hashes(*numbers: int) -> list[str]:
    return sorted(hash_of(number) for number in numbers)


def _totals(found: dict[str, Any]) -> tuple[int, int, int]:
    return found["both_pages"], found["only_source_pages"], found["only_target_pages"]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pages_that_only_one_store_has_are_named(
    first: str,
    second: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = store_of(first), store_of(second)
    source.fill(range(5))
    target.fill(range(2, 6))

    code, found = run_json(capsys, "diff", *source.flags, *target.target_flags, "--list")

    assert (1, (3, 2, 1)) == (code, _totals(found))
    (space,) = found["spaces"]
    assert _hashes(0, 1) == space["only_source"]
    assert _hashes(5) == space["only_target"]


@pytest.mark.parametrize("flags", [[], ["--verify"]])
def test_a_copy_does_not_differ(
    flags: list[str], store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("hf3fs")
    source.fill(range(5))
    source.fill(range(3), DRAFT)
    assert main(["copy", *source.flags, *target.target_flags]) == 0
    capsys.readouterr()

    code, found = run_json(capsys, "diff", *source.flags, *target.target_flags, *flags)

    assert (0, (8, 0, 0)) == (code, _totals(found))


def test_frames_of_another_size_are_no_difference() -> None:
    source = MemoryStorage()
    key_space = save(source, range(3))
    target = HookedStorage(Capabilities(alignment=4096, enumerable=True))
    copy(source, target, [key_space], Meter(), RateLimit(None))

    for one, other in ((source, target), (target, source)):
        compared = select_pairs(one, other, SpaceSelection(ids=[key_space.id]))
        (found,) = compare(one, other, compared.pairs, Meter())
        assert (3, {"source": [], "target": []}) == (found.both, found.only)


def test_a_key_space_that_only_the_target_has_is_found(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("redis")
    source.fill(range(2))
    target.fill(range(2))
    target.fill(range(3), DRAFT)

    code, found = run_json(
        capsys, "diff", *source.flags, *target.target_flags, "--pool", "draft", "--list"
    )

    assert (1, (0, 0, 3)) == (code, _totals(found))


def test_a_damaged_page_is_found_by_reading(
    store: CliStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = CliStore("file", {"path": str(tmp_path / "target")})
    key_space = store.fill(range(4))
    target.fill(range(4))
    store.break_page(2, key_space)
    argv = ["diff", *store.flags, *target.target_flags]

    assert main(argv) == 0
    assert main([*argv, "--verify"]) == 1
    assert "source: 1 page corrupt\n" in capsys.readouterr().out

    _, found = run_json(capsys, *argv, "--verify", "--list")
    (space,) = found["spaces"]
    assert (3, 0, 1) == _totals(found)
    assert [hash_of(2)] == [one["hash"] for one in space["wrong_source"]] == space["only_target"]


def test_a_page_of_another_length_is_found_in_the_listing(
    file_store: CliStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = CliStore("file", {"path": str(tmp_path / "target")})
    file_store.fill(range(3))
    target.fill(range(3))
    (path,) = (tmp_path / "target").rglob(hash_of(1))
    path.write_bytes(path.read_bytes()[:-9])

    code, found = run_json(capsys, "diff", *file_store.flags, *target.target_flags)

    assert (1, (2, 1, 0)) == (code, _totals(found))
    assert {"wrong_size": 1} == found["wrong_target_pages"]


def test_the_pages_are_listed_with_signs(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("hf3fs")
    key_space = source.fill(range(3))
    target.fill(range(1, 4))
    source.break_page(1, key_space)

    assert main(["diff", *source.flags, *target.target_flags, "--list", "--verify"]) == 1

    space_id = key_space.id
    assert set(capsys.readouterr().out.splitlines()) == {
        f"< {space_id} {hash_of(0)}",
        f"! {space_id} {hash_of(1)} corrupt in the source",
        f"> {space_id} {hash_of(1)}",
        f"> {space_id} {hash_of(3)}",
    }


def test_two_empty_stores_do_not_differ(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("redis"), store_of("redis")

    assert main(["diff", *source.flags, *target.target_flags]) == 0
    assert capsys.readouterr().out == (
        "0 key spaces: 0 pages in both, 0 only in the source, 0 only in the target\n"
    )


def test_a_store_that_is_not_there_is_no_empty_one(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(2))
    missing = CliStore("file", {"path": str(tmp_path / "missing")})
    dead = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}/0", "timeout_s": 1})

    for other in (missing, dead):
        assert main(["diff", *file_store.flags, *other.target_flags]) == 2
        assert main(["diff", *other.flags, *file_store.target_flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"there is no store at {tmp_path}/missing" in printed.err


def test_a_name_that_neither_store_has_is_refused(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("hf3fs")
    source.fill(range(1))
    target.fill(range(1))

    assert main(["diff", *source.flags, *target.target_flags, "--model", "typo"]) == 2
    assert "no key space of model 'typo'" in capsys.readouterr().err


def test_a_key_space_that_cannot_be_read_is_a_difference(
    file_store: CliStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = CliStore("file", {"path": str(tmp_path / "target")})
    key_space = file_store.fill(range(2))
    target.fill(range(2))
    (manifest,) = (tmp_path / "target").rglob("manifest.json")
    manifest.write_text("{")

    code, found = run_json(capsys, "diff", *file_store.flags, *target.target_flags)

    assert (1, (0, 2, 0)) == (code, _totals(found))
    assert [key_space.id] == [one["space_id"] for one in found["unreadable_target_spaces"]]


def test_the_same_store_is_refused(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(1))

    assert main(["diff", *file_store.flags, *file_store.target_flags]) == 2
    assert "diff: source and target are the same store" in capsys.readouterr().err


def test_two_tiers_of_one_store_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [file_member(name, tmp_path / name) for name in ("near", "far")]
    store = CliStore("tiered", {"tiers": tiers})
    store.fill(range(4))
    shutil.rmtree(next((tmp_path / "near").rglob(hash_of(1))).parent)
    sides = ["--tier", "near", "--to-tier", "far"]

    code, found = run_json(capsys, "diff", *store.flags, *store.target_flags, *sides)

    assert (1, (3, 0, 1)) == (code, _totals(found))
