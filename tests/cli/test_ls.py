"""`hicache ls`: key spaces and pages, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_stores import DRAFT, SPACE, CliStore, run_json
from composed_stores import file_member
from pages import hash_of, space

from hicache_storage.cli import main


def test_key_spaces_are_listed_with_pages_and_bytes(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(5))
    draft = store.fill(range(2), DRAFT)

    code, found = run_json(capsys, "ls", *store.flags)

    assert code == 0
    assert found["backend"] == store.backend
    assert {
        target.id: (5, 5 * target.stored_nbytes),
        draft.id: (2, 2 * draft.stored_nbytes),
    } == {one["id"]: (one["pages"], one["nbytes"]) for one in found["spaces"]}


def test_the_manifest_is_part_of_the_json(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1), space(tenant="acme", revision="r7"))

    _, found = run_json(capsys, "ls", *file_store.flags)

    (entry,) = found["spaces"]
    assert target.manifest().items() <= entry.items()


def test_pages_of_a_key_space_are_listed(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(5))
    store.fill(range(7), DRAFT)

    assert main(["ls", target.id[:8], *store.flags]) == 0

    assert {f"{hash_of(n)} {target.stored_nbytes}" for n in range(5)} == {
        *capsys.readouterr().out.splitlines()
    }


def test_pages_are_listed_as_json(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target = file_store.fill(range(2))

    _, found = run_json(capsys, "ls", target.id, *file_store.flags)

    assert found["id"] == target.id
    assert {hash_of(0), hash_of(1)} == {one["hash"] for one in found["page_list"]}


def test_an_empty_store_has_no_key_spaces(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.open().close()

    assert main(["ls", *store.flags]) == 0
    assert capsys.readouterr().out == "0 key spaces, 0 pages, 0 B\n"


def test_the_table_fits_80_columns(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        file_store.fill(
            range(1),
            space(
                model="an-organization/A-Model-Of-A-Very-Long-Name-405B-Instruct-FP8",
                tenant=f"tenant-{number}",
                layout="page_first_direct",
                dtype="float8_e4m3fn",
                pool="indexer",
            ),
        )

    assert main(["ls", *file_store.flags]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "tenant-2" in "".join(lines).replace("\n", "")


def test_pages_are_not_counted_where_that_is_not_wanted(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(3))

    _, found = run_json(capsys, "ls", "--no-count", *file_store.flags)

    assert [None] == [one["pages"] for one in found["spaces"]]


def test_an_unknown_key_space_is_wrong_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(1))

    assert main(["ls", "0000", *file_store.flags]) == 2
    assert "has no key space '0000'" in capsys.readouterr().err


def test_too_few_digits_of_an_id_are_wrong_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1), SPACE)

    assert main(["ls", target.id[:3], *file_store.flags]) == 2
    assert "at least 4 digits" in capsys.readouterr().err


def test_a_name_is_never_cut(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    name = "an-organization/A-Model-Of-A-Very-Long-Name-405B-Instruct-FP8-" * 3
    target = file_store.fill(range(1), space(model=name))

    assert main(["ls", *file_store.flags]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert name in lines
    assert [target.id[:8]] == [line.split()[0] for line in lines if "1 page" in line][:1]


def test_an_id_is_not_cut_on_50_columns(
    file_store: CliStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = file_store.fill(range(1234), space(pool="indexer"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")

    assert main(["ls", *file_store.flags]) == 0
    assert f"  {target.id[:8]} " in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["file", "tiered"])
def test_a_layout_of_vllm_takes_no_room_from_ids_and_figures(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [
        {"name": name, "backend": "file", "config": {"path": str(tmp_path / name)}}
        for name in ("nvme", "rack")
    ]
    config = {"tiers": tiers} if backend == "tiered" else {"path": str(tmp_path)}
    store = CliStore(backend, config)
    layout = f"vllm-rows-1;{'order=LBHNC;' * 6}hash=32"
    target = store.fill(range(5), space(layout=layout, pool="group_0.FullAttentionSpec"))

    assert main(["ls", *store.flags]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (row,) = (line for line in lines if target.id[:8] in line)
    assert {"group_0.FullAttentionSpec", "5", "20.6"} <= {*row.split()}


@pytest.mark.parametrize("verb", [["ls"], ["gc", "--pool", "kv"], ["inspect", "SPACE"]])
def test_a_name_commands_no_terminal(
    verb: list[str], file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "m\x1b]52;c;cm0=\x07\x1b[2J\nfake 12345678 row\u202etxt"
    target = file_store.fill(range(1), space(model=name, tenant="\x1b[8m"))

    main([target.id if word == "SPACE" else word for word in verb] + file_store.flags)

    printed = capsys.readouterr().out
    assert "\\x1b]52" in printed
    assert not [char for char in printed if not char.isprintable() and char != "\n"]
    assert not [line for line in printed.splitlines() if line.startswith("fake")]


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_the_use_of_a_capacity_is_shown(
    backend: str, store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = store_of(backend)
    store = replace(plain, config={**plain.config, "capacity_nbytes": "1MiB"})
    target = store.fill(range(40))

    assert main(["ls", *store.flags]) == 0
    assert " of the capacity of 1 MiB in use (" in capsys.readouterr().out
    _, found = run_json(capsys, "ls", *store.flags)
    (fill,) = found["capacities"]
    assert 1 << 20 == fill["capacity_nbytes"]
    assert 40 * target.stored_nbytes <= fill["used_nbytes"] < 1 << 20


def test_each_tier_has_a_capacity_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [
        file_member("near", tmp_path / "near", capacity_nbytes="1MiB"),
        file_member("far", tmp_path / "far"),
    ]
    store = CliStore("tiered", {"tiers": tiers})
    store.fill(range(4))

    _, found = run_json(capsys, "ls", *store.flags)

    assert ["near"] == [one["store"] for one in found["capacities"]]
