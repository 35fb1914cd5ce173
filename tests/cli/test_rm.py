"""`hicache rm`: it removes the named pages of one key space, and only with --yes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_stores import DRAFT, CliStore, run_json
from composed_stores import file_member
from pages import hash_of, page
from sealed_stores import key_files
from servers import free_port

from hicache_storage.cli import main


def test_a_page_is_shown_and_stays(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target = store.fill(range(3))

    assert main(["rm", target.id[:8], hash_of(1)[:8], *store.flags]) == 1

    assert capsys.readouterr().out == (
        f"{hash_of(1)}\nNothing was removed. Use --yes to remove them.\n"
    )
    assert [0, 1, 2] == store.numbers(target)


def test_the_named_pages_go_and_no_others(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target, other = store.fill(range(4)), store.fill(range(4), DRAFT)

    code, found = run_json(
        capsys, "rm", target.id[:8], hash_of(1)[:8], hash_of(2), "--yes", *store.flags
    )

    assert (0, 2, []) == (code, found["removed_pages"], found["kept"])
    assert [0, 3] == store.numbers(target)
    assert [0, 1, 2, 3] == store.numbers(other)


@pytest.mark.parametrize("page_hash", [hash_of(7), hash_of(7)[:8], hash_of(7)[:32]])
def test_a_page_that_is_not_there_is_no_success(
    page_hash: str, store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(2))

    argv = ["rm", target.id[:8], hash_of(1), page_hash, "--yes", *store.flags]
    assert main(argv) == 2

    assert f"the store has no page {page_hash!r}" in capsys.readouterr().err
    assert [0, 1] == store.numbers(target)


def test_a_damaged_page_goes(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target = file_store.fill(range(3))
    (path,) = Path(file_store.config["path"]).rglob(hash_of(1))
    os.truncate(path, 10)

    code, found = run_json(capsys, "rm", target.id, hash_of(1), "--yes", *file_store.flags)

    assert (0, 1) == (code, found["removed_pages"])
    assert not path.exists()


def test_a_page_goes_from_every_tier_or_from_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [file_member(name, tmp_path / name) for name in ("near", "far")]
    store = CliStore("tiered", {"tiers": tiers})
    target = store.fill(range(3))

    assert main(["rm", target.id, hash_of(1), "--yes", *store.flags]) == 0
    assert main(["rm", target.id, hash_of(2), "--yes", "--tier", "near", *store.flags]) == 0

    capsys.readouterr()
    left = {
        name: len(run_json(capsys, "ls", target.id, *store.flags, "--tier", name)[1]["page_list"])
        for name in ("near", "far")
    }
    assert {"near": 1, "far": 2} == left


def test_a_page_in_a_former_stripe_is_removed_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stripes = [file_member(name, tmp_path / name) for name in "ab"]
    target = CliStore("striped", {"stripes": stripes}).fill(range(20))
    left = next(n for n in range(20) if [*(tmp_path / "a").rglob(hash_of(n))])
    with CliStore("file", {"path": str(tmp_path / "b")}).open() as storage:
        storage.open_space(target)
        stray = page(target.stored_nbytes)
        assert storage.batch_set(target, [hash_of(left)], [stray]) == [True]
    (path,) = (tmp_path / "a").rglob(hash_of(left))
    path.unlink()
    argv = [
        "rm",
        target.id,
        hash_of(left),
        "--yes",
        *CliStore("striped", {"stripes": stripes}).flags,
    ]

    assert main(argv) == 2
    assert "is only in b, where engines do not look for it" in capsys.readouterr().err
    assert main([*argv, "--tier", "b"]) == 0
    assert [] == [*tmp_path.rglob(hash_of(left))]


def test_a_sealed_page_goes(
    store_of: Callable[[str], CliStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"backend": "file", "config": store_of("file").config}
    store = CliStore("encrypted", {**inner, **key_files(tmp_path, "a")})
    target = store.fill(range(2))

    code, _ = run_json(capsys, "rm", target.id, hash_of(1), "--yes", *store.flags)

    assert (0, [0]) == (code, store.numbers(target))


def test_a_store_that_cannot_be_looked_at_has_no_answer(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(3))
    missing = CliStore("file", {"path": str(tmp_path / "missing")})
    dead = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}/0", "timeout_s": 1})
    stale = replace(file_store, config={**file_store.config, "capacity_nbytes": 100})

    for store in (missing, dead, stale):
        assert main(["rm", target.id, hash_of(1), "--yes", *store.flags]) == 2
    assert capsys.readouterr().err.count("\n") == 3
    assert [0, 1, 2] == file_store.numbers(target)
