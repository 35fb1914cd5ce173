"""`hicache gc`: it shows which pages it would delete, and deletes them only with --yes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore, run_json
from composed_stores import file_member
from pages import hash_of, page, space

from hicache_storage.cli import main

OLD = space(model="old-model")
LONG_AGO_S = time.time() - 2 * 86_400


def _bounded(store: CliStore) -> CliStore:
    """Return the store with a capacity, so that it records when pages are used."""
    return replace(store, config={**store.config, "capacity_nbytes": 1 << 30})


def test_a_key_space_is_shown_and_stays(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    old = store.fill(range(4), OLD)
    store.fill(range(3))

    code, found = run_json(capsys, "gc", "--model", "old-model", *store.flags)

    assert (1, 0) == (code, found["removed_pages"])
    assert [(old.id, 4)] == [(one["id"], one["pages"]) for one in found["spaces"]]
    assert store.numbers(old) == [0, 1, 2, 3]


def test_a_key_space_goes_with_yes_and_no_other_does(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    old = store.fill(range(4), OLD)
    other = store.fill(range(3))

    code, found = run_json(capsys, "gc", "--model", "old-model", "--yes", *store.flags)

    assert (0, 4) == (code, found["removed_pages"])
    assert store.numbers(old) == []
    assert store.numbers(other) == [0, 1, 2]


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--revision", "r1"], {"r1"}),
        (["--tenant", "acme"], {"acme"}),
        (["--tenant", ""], {"r1"}),
        (["--pool", "kv"], {"r1", "acme"}),
    ],
)
def test_key_spaces_are_selected_by_each_field(
    flags: list[str],
    gone: set[str],
    file_store: CliStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = {
        file_store.fill(range(1), space(revision="r1")).id: "r1",
        file_store.fill(range(1), space(tenant="acme")).id: "acme",
    }

    _, found = run_json(capsys, "gc", *flags, *file_store.flags)

    assert gone == {ids[one["id"]] for one in found["spaces"]}


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_a_key_space_that_was_used_is_not_unused(
    backend: str, store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    store = _bounded(store_of(backend))
    store.fill(range(3))

    code, found = run_json(capsys, "gc", "--unused-for", "1h", *store.flags)

    assert (0, []) == (code, found["spaces"])


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_an_unused_key_space_goes(
    backend: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _bounded(store_of(backend))
    target = store.fill(range(3))
    now_s = time.time()
    monkeypatch.setattr("hicache_storage.cli.gc.time.time", lambda: now_s + 2 * 86_400)

    code, found = run_json(capsys, "gc", "--unused-for", "1d", "--yes", *store.flags)

    assert (0, 3) == (code, found["removed_pages"])
    assert store.numbers(target) == []


def test_a_key_space_that_was_used_meanwhile_is_kept(
    file_store: CliStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _bounded(file_store)
    used, unused = store.fill(range(3)), store.fill(range(2), OLD)
    files = [*Path(store.config["path"]).glob("spaces/*/??/*")]
    for path in files:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))

    def use_and_print(*_found: Any) -> None:
        with store.open() as storage:
            assert storage.batch_get(used, [hash_of(1)], [page(used.stored_nbytes)]) == [True]

    monkeypatch.setattr("hicache_storage.cli.gc._print", use_and_print)

    code = main(["gc", "--unused-for", "1d", "--yes", *store.flags])

    assert code == 0
    assert len(store.numbers(used)) == 3
    assert store.numbers(unused) == []
    assert capsys.readouterr().out == (
        f"Removed 1 key space with 2 pages.\nKey space {used.id[:8]} was kept: it was used meanwhile.\n"
    )


def test_one_used_page_keeps_its_key_space(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _bounded(file_store)
    target = store.fill(range(3))
    files = [*Path(store.config["path"]).glob(f"spaces/{target.id}/??/*")]
    for path in files[:2]:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))

    code, _ = run_json(capsys, "gc", "--unused-for", "1d", "--yes", *store.flags)

    assert code == 0
    assert len(store.numbers(target)) == 3


def test_a_store_that_does_not_know_uses_says_so(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill(range(2))

    assert main(["gc", "--unused-for", "1d", "--yes", *store.flags]) == 2
    message = capsys.readouterr().err
    assert "does not record when its pages are used" in message
    assert message.count("\n") == 1


def test_the_times_of_this_hosts_disk_say_nothing_about_a_shared_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, fleet = file_member("disk", tmp_path / "disk"), file_member("fleet", tmp_path / "fleet")
    disk["config"]["capacity_nbytes"] = 1 << 30
    store = CliStore("tiered", {"tiers": [disk, fleet]})
    saved = store.fill(range(3))
    for file in (tmp_path / "disk" / "spaces").rglob("*"):
        os.utime(file, (LONG_AGO_S, LONG_AGO_S))

    assert main(["gc", "--unused-for", "1d", "--yes", *store.flags]) == 2
    message = capsys.readouterr().err
    assert "a tier or stripe does not record when its pages are used: choose" in message
    assert message.count("\n") == 1
    assert store.numbers(saved) == [0, 1, 2]

    assert main(["gc", "--unused-for", "1d", "--yes", "--tier", "disk", *store.flags]) == 0
    assert not [*(tmp_path / "disk" / "spaces").iterdir()]
    assert store.numbers(saved) == [0, 1, 2]


@pytest.mark.parametrize("backend", ["file", "hf3fs", "s3"])
def test_a_key_space_without_new_pages_goes(
    backend: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_of(backend)
    target = store.fill(range(3))
    argv = ["gc", "--older-than", "1d", "--yes", *store.flags]
    assert (0, 0) == _removed(capsys, *argv)
    # The clock itself stays, because S3 refuses requests of another day.
    tomorrow_s = time.time() + 86_400

    def before(age_s: float | None) -> float | None:
        return age_s and tomorrow_s

    monkeypatch.setattr("hicache_storage.cli.gc._time_before", before)

    assert (0, 3) == _removed(capsys, *argv)
    assert store.numbers(target) == []


def _removed(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, int]:
    code, found = run_json(capsys, *argv)
    return code, found["removed_pages"]


def test_one_new_page_keeps_its_key_space(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(3))
    files = [*Path(file_store.config["path"]).glob(f"spaces/{target.id}/??/*")]
    for path in files[:2]:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))

    assert (0, 0) == _removed(capsys, "gc", "--older-than", "1d", "--yes", *file_store.flags)
    assert len(file_store.numbers(target)) == 3


def test_a_use_is_not_earlier_than_the_write(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _bounded(file_store)  # it records uses alone
    unused, used = store.fill(range(3)), store.fill(range(2), OLD)
    for path in Path(store.config["path"]).glob(f"spaces/{unused.id}/??/*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))

    _, found = run_json(capsys, "gc", "--older-than", "1d", "--yes", *store.flags)

    assert [unused.id] == [one["id"] for one in found["spaces"]]
    assert store.numbers(used) == [0, 1]


def test_both_ages_must_match(
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _bounded(store_of("hf3fs"))
    store.fill(range(3))
    now_s = time.time()
    monkeypatch.setattr("hicache_storage.cli.gc.time.time", lambda: now_s + 2 * 86_400)

    for ages, spaces in ((("1d", "3d"), 0), (("3d", "1d"), 0), (("1d", "1d"), 1)):
        flags = ["--older-than", ages[0], "--unused-for", ages[1]]
        _, found = run_json(capsys, "gc", *flags, *store.flags)
        assert spaces == len(found["spaces"])


@pytest.mark.parametrize(
    ("at_s", "reason"),
    [(0.0, "which cannot be"), (time.time() + 86_400, "in the future")],
    ids=["1970", "tomorrow"],
)
def test_a_key_space_with_impossible_writes_is_kept_and_named(
    at_s: float, reason: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(3))
    for path in Path(file_store.config["path"]).glob("spaces/*/??/*"):
        os.utime(path, (at_s, at_s))

    code, found = run_json(capsys, "gc", "--older-than", "1d", "--yes", *file_store.flags)

    assert (1, [target.id]) == (code, found["kept"])
    assert "was written " in found["reasons"][target.id]
    assert reason in found["reasons"][target.id]
    assert [0, 1, 2] == file_store.numbers(target)


def test_the_pages_of_tiers_have_the_latest_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [file_member(name, tmp_path / name) for name in ("near", "far")]
    store = CliStore("tiered", {"tiers": tiers})
    target = store.fill(range(3))
    for path in tmp_path.glob("near/spaces/*/??/*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    argv = ["gc", "--older-than", "1d", "--yes", *store.flags]

    assert (0, 0) == _removed(capsys, *argv)
    assert (0, 3) == _removed(capsys, *argv, "--tier", "near")
    assert [0, 1, 2] == store.numbers(target)


def test_a_store_that_does_not_know_writes_says_so(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("redis")
    store.fill(range(2))

    assert main(["gc", "--older-than", "1d", "--yes", *store.flags]) == 2
    assert "does not record when its pages are written" in capsys.readouterr().err


def test_a_selection_is_required(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target = file_store.fill(range(2))

    assert main(["gc", "--yes", *file_store.flags]) == 2
    assert "select key spaces" in capsys.readouterr().err
    assert file_store.numbers(target) == [0, 1]


def test_an_empty_store_has_nothing_to_remove(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.open().close()

    assert main(["gc", "--unused-for", "1d", *store.flags]) == 0
    assert capsys.readouterr().out == "0 key spaces, 0 pages, 0 B\n"


def test_the_table_says_how_much_would_go(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(4), OLD)

    assert main(["gc", "--space", target.id[:8], *file_store.flags]) == 1

    output: Any = capsys.readouterr().out
    assert "1 key space, 4 pages, 16.5 KiB" in output
    assert "Use --yes" in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_key_space_that_is_read_within_the_interval_of_notes_is_kept(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"capacity_nbytes": 1 << 30, "touch_interval_s": "1h"}
    store = replace(file_store, config={**file_store.config, **limits})
    target = store.fill(range(3))
    for path in Path(store.config["path"]).glob("spaces/*/??/*"):
        os.utime(path, (time.time() - 3000, time.time() - 3000))

    code, found = run_json(capsys, "gc", "--unused-for", "30m", "--yes", *store.flags)

    assert (0, []) == (code, found["spaces"])
    assert [0, 1, 2] == store.numbers(target)


@pytest.mark.parametrize(
    ("at_s", "reason"),
    [(0.0, "which cannot be"), (time.time() + 86_400, "in the future")],
    ids=["1970", "tomorrow"],
)
def test_a_key_space_of_impossible_times_is_kept_and_named(
    at_s: float, reason: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _bounded(file_store)
    target = store.fill(range(3))
    for path in Path(store.config["path"]).glob("spaces/*/??/*"):
        os.utime(path, (at_s, at_s))

    code, found = run_json(capsys, "gc", "--unused-for", "1d", "--yes", *store.flags)

    assert (1, [target.id]) == (code, found["kept"])
    assert reason in found["reasons"][target.id]
    assert [0, 1, 2] == store.numbers(target)


def test_empty_key_spaces_go_and_no_others(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = store.fill(range(2))
    empty = store.fill(range(1), OLD)
    with store.open() as storage:
        storage.clear(empty)

    code, found = run_json(capsys, "gc", "--empty", "--yes", *store.flags)
    _, listed = run_json(capsys, "ls", *store.flags)

    assert code == 0
    assert {one["id"] for one in found["spaces"]} <= {empty.id}
    assert [kept.id] == [one["id"] for one in listed["spaces"]]


def test_a_key_space_that_cannot_be_read_goes_on_demand(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, lost = file_store.fill(range(2)), file_store.fill(range(3), OLD)
    root = Path(file_store.config["path"])
    (root / "spaces" / lost.id / "manifest.json").write_text("{")

    assert main(["gc", "--model", kept.model, *file_store.flags]) == 1
    assert f"Key space {lost.id} cannot be read" in capsys.readouterr().out
    code, found = run_json(capsys, "gc", "--unreadable", "--yes", *file_store.flags)

    assert (0, 3) == (code, found["removed_pages"])
    assert [kept.id] == [path.name for path in (root / "spaces").iterdir()]


def test_a_key_space_whose_manifest_was_mended_meanwhile_is_kept(
    file_store: CliStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file_store.fill(range(2))
    lost = file_store.fill(range(3), OLD)
    manifest = Path(file_store.config["path"], "spaces", lost.id, "manifest.json")
    right = manifest.read_text()
    manifest.write_text("{")

    def mend(*_found: Any) -> None:
        manifest.write_text(right)

    monkeypatch.setattr("hicache_storage.cli.gc._print", mend)

    assert main(["gc", "--unreadable", "--yes", *file_store.flags]) == 1
    assert "it was mended or removed meanwhile" in capsys.readouterr().out
    assert len(file_store.numbers(lost)) == 3


def test_a_store_of_which_nothing_can_be_read_goes_by_name_only(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = file_store.fill(range(3))
    manifest = Path(file_store.config["path"]) / "spaces" / lost.id / "manifest.json"
    manifest.unlink()
    argv = ["gc", "--unreadable", "--yes", *file_store.flags]

    assert main(["gc", "--unreadable", *file_store.flags]) == 1
    assert "Nothing was removed. Name those to remove with --space" in capsys.readouterr().out
    assert main(argv) == 2
    assert "perhaps because of a wrong key" in capsys.readouterr().err
    assert main([*argv, "--space", lost.id[:8]]) == 0
    assert not manifest.parent.exists()


@pytest.mark.parametrize("names", ["all", "one"])
def test_a_key_space_whose_manifest_was_not_read_is_kept_with_the_reason(
    names: str,
    file_store: CliStore,
    unread: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file_store.fill(range(1))
    unknown, lost = file_store.fill(range(2), OLD), file_store.fill(range(3), space(model="lost"))
    spaces = Path(file_store.config["path"]) / "spaces"
    (spaces / lost.id / "manifest.json").unlink()
    unread(spaces / unknown.id / "manifest.json")
    chosen = ["--space", unknown.id] if names == "one" else []

    code, found = run_json(capsys, "gc", "--unreadable", "--yes", *chosen, *file_store.flags)

    kinds = {one["space_id"]: one["kind"] for one in found["unreadable_spaces"]}
    assert (1, [unknown.id], "not_read") == (code, found["kept"], kinds[unknown.id])
    assert "its manifest cannot be read: Input/output error" in found["reasons"][unknown.id]
    assert len([*(spaces / unknown.id).rglob("*")]) > 2
    assert (spaces / lost.id).exists() == (names == "one")


def test_a_file_of_another_program_keeps_its_key_space_and_no_other(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = [file_store.fill(range(3)), file_store.fill(range(2), OLD)]
    places = sorted(Path(file_store.config["path"], "spaces", one.id) for one in lost)
    for place in places:
        (place / "manifest.json").unlink()
    (places[0] / "thesis.tex").touch()

    assert main(["gc", "--unreadable", *file_store.flags]) == 1
    assert "2 key spaces that cannot be read\nNothing was removed" in capsys.readouterr().out
    code, found = run_json(
        capsys,
        "gc",
        "--unreadable",
        "--yes",
        "--space",
        lost[0].id,
        "--space",
        lost[1].id,
        *file_store.flags,
    )

    assert (1, [places[0].name]) == (code, found["kept"])
    reason = found["reasons"][places[0].name]
    assert "thesis.tex belongs to another program, so its key space stays, without its" in reason
    assert [place.exists() for place in places] == [True, False]


def test_a_removal_that_fails_prints_the_figures_so_far(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(2))
    store = replace(file_store, config={**file_store.config, "capacity_nbytes": 100})

    code, found = run_json(capsys, "gc", "--pool", "kv", "--yes", *store.flags)

    assert (2, 0, 1) == (code, found["removed_pages"], len(found["spaces"]))


def test_a_store_beyond_the_capacity_of_the_config_is_not_opened_for_a_removal(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    old, other = file_store.fill(range(20), OLD), file_store.fill(range(20))
    store = replace(file_store, config={**file_store.config, "capacity_nbytes": 10_000})

    assert main(["gc", "--model", "old-model", "--yes", *store.flags]) == 2
    assert "would evict pages" in capsys.readouterr().err
    assert [*range(20)] == file_store.numbers(old) == file_store.numbers(other)
