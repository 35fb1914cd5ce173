"""`hicache verify`: it reads every page, and lists each wrong page with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_stores import DRAFT, SPACE, CliStore, break_page, run_json, save
from hicache_backends.memory import MemoryStorage
from pages import hash_of, page
from sealed_stores import key_files, page_file
from verb_processes import interrupted, on_terminal, slow_store

from hicache_storage import open_storage
from hicache_storage.cli import main
from hicache_storage.cli.operations.proofs import Proof
from hicache_storage.cli.operations.verification import delete_wrong, verify
from hicache_storage.cli.progress import Meter


def test_right_pages_are_proved(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    target = store.fill(range(70))
    draft = store.fill(range(3), DRAFT)

    code, found = run_json(capsys, "verify", *store.flags)

    assert code == 0
    assert (73, 73) == (found["pages"], found["proofs"]["ok"])
    assert 70 * target.stored_nbytes + 3 * draft.stored_nbytes == found["nbytes"]
    assert found["findings"] == []


def test_a_wrong_page_is_named_by_its_reason(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(5))
    store.break_page(3, target)

    code, found = run_json(capsys, "verify", *store.flags)

    assert code == 1
    (finding,) = found["findings"]
    assert (target.id, hash_of(3), "corrupt") == (
        finding["space"],
        finding["hash"],
        finding["reason"],
    )
    assert store.numbers(target) == [*range(5)]


def test_wrong_pages_are_deleted_on_demand(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(5))
    store.break_page(3, target)

    code, found = run_json(capsys, "verify", "--delete-wrong", "--yes", *store.flags)

    assert (1, 1) == (code, found["deleted"])
    assert store.numbers(target) == [0, 1, 2, 4]


def test_a_page_of_another_key_is_wrong() -> None:
    storage = MemoryStorage()
    target = save(storage, range(2))
    other = page(target.stored_nbytes)
    assert storage.batch_get(target, [hash_of(0)], [other]) == [True]
    storage.batch_set(target, [hash_of(7)], [other])

    result = verify(storage, [target], Meter())

    assert {hash_of(7): Proof.WRONG_KEY} == {
        finding.page.page_hash: finding.page.proof for finding in result.findings
    }


def test_a_page_without_a_checksum_is_not_proved_and_stays() -> None:
    storage = MemoryStorage()
    target = save(storage, range(2), checksum="none")

    result = verify(storage, [target], Meter())

    assert result.proofs[Proof.NO_CHECKSUM] == 2
    assert not result.is_clean
    delete_wrong(storage, storage, result.findings, result)

    assert result.deleted == 0


def test_pages_without_frames_cannot_be_proved() -> None:
    storage = MemoryStorage()
    storage.open_space(SPACE)
    storage.batch_set(SPACE, [hash_of(0)], [page()])

    result = verify(storage, [SPACE], Meter())

    assert result.proofs == {Proof.NO_FRAME: 1}


def test_a_page_that_was_replaced_meanwhile_is_not_deleted() -> None:
    storage = MemoryStorage()
    target = save(storage, range(2))
    break_page(storage, 1, target)
    result = verify(storage, [target], Meter())
    storage.batch_delete(target, [hash_of(1)])
    save(storage, [1])

    delete_wrong(storage, storage, result.findings, result)

    assert result.deleted == 0
    assert storage.batch_exists(target, [hash_of(1)]) == [True]


def test_a_sample_reads_a_share_of_the_pages() -> None:
    storage = MemoryStorage()
    target = save(storage, range(100))
    draws = iter(number / 100 for number in range(100))

    result = verify(storage, [target], Meter(), share=0.1, chance=lambda: next(draws))

    assert result.pages == 10


def test_a_sample_reads_a_page_of_each_key_space() -> None:
    storage = MemoryStorage()
    targets = [save(storage, range(100)), save(storage, range(50), DRAFT)]
    draws = iter([*(0.5,) * 7, 0.2, *(0.5,) * 92, *(0.5,) * 50])

    result = verify(storage, targets, Meter(), share=0.001, chance=lambda: next(draws))

    assert result.pages == 2


def test_only_the_selected_key_spaces_are_read(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(5))
    file_store.fill(range(2), DRAFT)

    _, found = run_json(capsys, "verify", "--pool", "draft", *file_store.flags)

    assert found["pages"] == 2


def test_an_empty_store_is_fine(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.open().close()

    assert main(["verify", *store.flags]) == 0
    assert capsys.readouterr().out.startswith("0 pages, 0 B in ")


def test_yes_without_a_deletion_is_wrong_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--yes", *file_store.flags]) == 2
    assert "--yes is for --delete-wrong" in capsys.readouterr().err


def test_deleting_needs_yes_where_nobody_can_be_asked(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--delete-wrong", *file_store.flags]) == 2
    assert "use --yes" in capsys.readouterr().err


def test_a_terminal_is_asked_before_a_page_is_deleted(file_store: CliStore, tmp_path: Path) -> None:
    target = file_store.fill(range(3))
    file_store.break_page(1, target)

    code, output = on_terminal(tmp_path, "no\n", "verify", "--delete-wrong", *file_store.flags)
    assert (1, True) == (code, "Nothing was deleted." in output)
    assert file_store.numbers(target) == [0, 1, 2]

    code, output = on_terminal(tmp_path, "yes\n", "verify", "--delete-wrong", *file_store.flags)
    assert (1, True) == (code, "Deleted 1 of 1 wrong page." in output)
    assert file_store.numbers(target) == [0, 2]


def test_the_table_fits_80_columns(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(60))
    for number in range(55):
        file_store.break_page(number, target)

    assert main(["verify", *file_store.flags]) == 1

    output = capsys.readouterr().out
    assert "5 more: use --json to see all of them." in output
    assert "page: the first 40 digits" in output
    assert max(map(len, output.splitlines()[:-1])) <= 80


def test_ctrl_c_ends_it_cleanly_with_its_figures(file_store: CliStore, tmp_path: Path) -> None:
    file_store.fill(range(200), DRAFT)
    file_store.fill(range(200))
    slow = slow_store(file_store, tmp_path)

    code, output, errors = interrupted(tmp_path, "verify", "--json", *slow.flags)

    document = json.loads(output)
    assert (130, "hicache: interrupted\n", False) == (code, errors, document["is_done"])
    assert {"proofs", "findings", "pages"} <= {*document}


def test_pages_of_a_wrong_length_are_found_and_deleted_on_demand(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(5))
    (path,) = Path(file_store.config["path"]).glob(f"spaces/{target.id}/??/{hash_of(3)}")
    os.truncate(path, 100)

    code, found = run_json(capsys, "verify", "--delete-wrong", "--yes", *file_store.flags)

    assert (1, 1) == (code, found["deleted"])
    assert [(hash_of(3), "wrong_size")] == [
        (one["hash"], one["reason"]) for one in found["findings"]
    ]
    assert not path.exists()


def test_key_spaces_that_cannot_be_read_are_something_found(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(5))
    (Path(file_store.config["path"]) / "spaces" / target.id / "manifest.json").unlink()

    for name in ("verify", "ls"):
        code, found = run_json(capsys, name, *file_store.flags)
        assert (1, [target.id]) == (code, [one["space_id"] for one in found["unreadable_spaces"]])


@pytest.mark.parametrize("verb", ["verify", "gc", "copy"])
def test_a_selection_that_matches_nothing_is_wrong_use(
    verb: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(1))
    target = ["--to-backend", "memory"] if verb == "copy" else []

    assert main([verb, "--model", f"{SPACE.model}x", *target, *file_store.flags]) == 2

    message = capsys.readouterr().err
    assert f"no key space of model '{SPACE.model}x'; did you mean '{SPACE.model}'?" in message


@pytest.mark.parametrize("verb", ["verify", "gc", "copy"])
def test_a_selection_from_an_empty_store_is_wrong_use(
    verb: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    open_storage("file", file_store.config).close()
    target = ["--to-backend", "memory"] if verb == "copy" else []

    assert main([verb, "--model", "m", *target, *file_store.flags]) == 2

    assert "the store has no key space of model 'm'\n" in capsys.readouterr().err


def test_a_damaged_page_is_no_page_that_is_gone(tmp_path: Path) -> None:
    inner = {"backend": "file", "config": {"path": str(tmp_path / "kv")}}
    sealed = CliStore("encrypted", {**inner, **key_files(tmp_path)})
    target = sealed.fill(range(3))
    file = page_file(tmp_path / "kv", target, hash_of(1))
    file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 1]))

    with open_storage("encrypted", sealed.config, read_only=True) as storage:
        result = verify(storage, [target], Meter())

    assert {Proof.OK: 2} != result.proofs
    assert not result.is_clean
    assert 0 == result.proofs[Proof.GONE]
