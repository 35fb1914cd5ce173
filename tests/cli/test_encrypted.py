"""The verbs of `hicache` on a store of sealed pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, SPACE, CliStore, run_json
from pages import hash_of
from sealed_stores import key_files, page_file

from hicache_storage.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def sealed(tmp_path: Path, root: Path) -> CliStore:
    inner: dict[str, Any] = {"backend": "file", "config": {"path": str(root)}}
    return CliStore("encrypted", {**inner, **key_files(tmp_path)})


@pytest.fixture
def beneath(root: Path) -> CliStore:
    """Return the store below the encryption, without keys."""
    return CliStore("file", {"path": str(root)})


def test_ls_names_key_spaces_and_counts_pages(
    sealed: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed.fill(range(5))
    sealed.fill(range(3), DRAFT)

    code, found = run_json(capsys, "ls", *sealed.flags)

    assert code == 0
    assert {("kv", 5), ("draft", 3)} == {(one["pool"], one["pages"]) for one in found["spaces"]}


def test_verify_proves_every_page(sealed: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    sealed.fill(range(5))

    code, found = run_json(capsys, "verify", *sealed.flags)

    assert (0, 5) == (code, found["proofs"]["ok"])


def test_verify_finds_a_page_that_does_not_open(
    sealed: CliStore, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = sealed.fill(range(5))
    file = page_file(root, target, hash_of(3))
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])

    _, found = run_json(capsys, "verify", *sealed.flags)

    assert found["proofs"]["ok"] == 4


def test_inspect_shows_the_frame_and_the_proof_of_a_page(
    sealed: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = sealed.fill(range(1))

    code, facts = run_json(capsys, "inspect", target.id, hash_of(0), *sealed.flags)

    assert (0, "ok", "HiKV") == (code, facts["proof"], facts["frame"]["magic"])


def test_doctor_names_the_keys(sealed: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    sealed.fill(range(1))

    main(["doctor", "--page-bytes", "4KiB", "--pages", "4", *sealed.flags])
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith(" keys ")]

    assert ["keys", "ok", "1", "key;"] == line.split()[:4]
    assert "'a' seals new pages, and 'a' seals names" in line


def test_copy_seals_the_pages_of_another_store(
    sealed: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = CliStore("file", {"path": str(tmp_path / "plain")})
    target = plain.fill(range(5))

    assert main(["copy", *plain.flags, *sealed.target_flags]) == 0
    assert [*range(5)] == sealed.numbers(target)
    capsys.readouterr()


def test_copy_without_keys_is_refused_with_the_reason(
    sealed: CliStore, beneath: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed.fill(range(5))
    other = CliStore("file", {"path": str(tmp_path / "other")})

    assert main(["copy", *beneath.flags, *other.target_flags]) == 1
    assert "its pages have no frames to check them by" in capsys.readouterr().out


def test_without_keys_the_store_shows_no_model(
    sealed: CliStore, beneath: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed.fill(range(5))

    code, found = run_json(capsys, "ls", *beneath.flags)

    (one,) = found["spaces"]
    assert (0, 5) == (code, one["pages"])
    assert SPACE.model not in str(found)
    assert one["model"].startswith("sealed:")


def test_a_store_that_is_not_there_is_named(
    sealed: CliStore, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", *sealed.flags]) == 2
    assert f"there is no store at {root}" in capsys.readouterr().err
