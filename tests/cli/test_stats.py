"""`hicache stats`: how full a store is, and which pages came and went between two looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, CliStore, run_json
from composed_stores import file_member
from pages import hash_of
from servers import free_port

from hicache_storage.cli import main


def _watch(monkeypatch: pytest.MonkeyPatch, *changes: Callable[[], Any]) -> list[str]:
    """Make the changes between the looks of a watch. Return the flags for it."""
    left = iter(changes)

    def wait(_until_s: float) -> None:
        next(left)()

    monkeypatch.setattr("hicache_storage.cli.stats._wait", wait)
    return ["--watch", "1h", "--count", str(len(changes))]


def test_the_pages_are_counted(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = store.fill(range(5)), store.fill(range(3), DRAFT)

    code, found = run_json(capsys, "stats", *store.flags)

    (one,) = found["stores"]
    assert (0, 8) == (code, one["pages"])
    assert 5 * target.stored_nbytes + 3 * draft.stored_nbytes == one["nbytes"]


def test_pages_that_come_and_go_are_told(
    store: CliStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = store.fill(range(5))

    def delete() -> None:
        with store.open() as storage:
            storage.batch_delete(target, [hash_of(0), hash_of(6)])

    flags = _watch(monkeypatch, lambda: store.fill(range(3, 8)), delete, lambda: None)
    assert main(["stats", *store.flags, *flags, "--json"]) == 0

    found = [json.loads(line)["stores"][0] for line in capsys.readouterr().out.splitlines()]
    assert [(8, 3, 0), (6, 0, 2), (6, 0, 0)] == [
        (one["pages"], one["new_pages"], one["gone_pages"]) for one in found
    ]


def test_a_line_for_people_has_rates_and_the_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = replace(file_store, config={**file_store.config, "capacity_nbytes": "1MiB"})
    store.fill(range(5))

    assert main(["stats", *store.flags, *_watch(monkeypatch, lambda: store.fill(range(9)))]) == 0

    head, line = capsys.readouterr().out.splitlines()
    assert ["time", "store", "pages", "size", "in", "use", "new/s", "gone/s"] == head.split()
    cells = line.split()
    assert ["file", "9"] == cells[1:3]
    assert 0 < float(cells[-2])
    assert "%" in line
    assert max(len(head), len(line)) <= 88


def test_each_tier_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [
        file_member("near", tmp_path / "near", capacity_nbytes="1MiB"),
        file_member("far", tmp_path / "far"),
    ]
    store = CliStore("tiered", {"tiers": tiers})
    store.fill(range(4))

    _, found = run_json(capsys, "stats", *store.flags)
    near, far = found["stores"]
    assert [("near", 4), ("far", 4)] == [(one["store"], one["pages"]) for one in (near, far)]
    assert [1 << 20, None] == [one["capacity_nbytes"] for one in (near, far)]
    _, found = run_json(capsys, "stats", *store.flags, "--tier", "far")
    assert [4] == [one["pages"] for one in found["stores"]]
    assert main(["stats", *store.flags, "--tier", "far"]) == 0
    assert "far" in capsys.readouterr().out
    assert main(["stats", *store.flags, "--tier", "far", "--watch", "10ms", "--count", "1"]) == 0
    assert "far" in capsys.readouterr().out


def test_an_empty_store_is_no_error(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.open().close()

    code, found = run_json(capsys, "stats", *store.flags)

    assert (0, [0]) == (code, [one["pages"] for one in found["stores"]])


def test_a_store_that_cannot_be_looked_at_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = CliStore("file", {"path": str(tmp_path / "missing")})
    dead = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}/0", "timeout_s": 1})

    for store in (missing, dead):
        assert main(["stats", *store.flags]) == 2
        assert main(["stats", *store.flags, "--watch", "1s"]) == 2
    assert capsys.readouterr().out == ""


def test_key_spaces_that_cannot_be_read_are_told(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(2))
    (Path(file_store.config["path"]) / "spaces" / target.id / "manifest.json").write_text("{")

    assert main(["stats", *file_store.flags]) == 1
    assert "Not counted: 1 key space that cannot be read;" in capsys.readouterr().out


def test_a_count_needs_a_watch(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    file_store.open().close()

    assert main(["stats", *file_store.flags, "--count", "2"]) == 2
    assert "--count is for --watch" in capsys.readouterr().err
