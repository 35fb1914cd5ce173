"""`hicache inspect`: the manifest of a key space, the frame of a page, and whether it is intact."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from cli_stores import CliStore, run_json
from pages import hash_of

from hicache_storage.cli import main


def test_the_manifest_of_a_key_space_is_shown(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(4))

    code, facts = run_json(capsys, "inspect", target.id[:8], *store.flags)

    assert code == 0
    assert target.manifest().items() <= facts.items()
    assert (4, 4 * target.stored_nbytes) == (facts["pages"], facts["total_nbytes"])


def test_frame_and_proof_of_a_page_are_shown(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(2))

    code, facts = run_json(capsys, "inspect", target.id, hash_of(1), *store.flags)

    assert (0, "ok") == (code, facts["proof"])
    frame = facts["frame"]
    assert ("HiKV", 1, target.page_nbytes) == (
        frame["magic"],
        frame["version"],
        frame["payload_nbytes"],
    )
    assert (target.id, hash_of(1)) == (frame["space"], frame["hash"])


def test_a_wrong_page_is_something_found(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(2))
    store.break_page(1, target)

    code, facts = run_json(capsys, "inspect", target.id, hash_of(1), *store.flags)

    assert (1, "corrupt") == (code, facts["proof"])


def test_an_absent_page_is_something_found(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(2))

    code, facts = run_json(capsys, "inspect", target.id, hash_of(9), *store.flags)

    assert (1, "gone") == (code, facts["proof"])
    assert "frame" not in facts


def test_a_hash_that_is_none_is_wrong_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1))

    assert main(["inspect", target.id, "../../etc", *file_store.flags]) == 2
    assert "lowercase hex" in capsys.readouterr().err


def test_the_table_fits_80_columns(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1))

    assert main(["inspect", target.id, hash_of(0), *file_store.flags]) == 0

    output = capsys.readouterr().out
    assert "proof" in output
    assert max(map(len, output.splitlines())) <= 80


def _seconds(iso: str) -> float:
    return datetime.strptime(iso, "%Y-%m-%dT%H:%M:%S%z").timestamp()


@pytest.mark.parametrize(
    ("backend", "known"),
    [("file", ["written_at"]), ("s3", ["written_at"]), ("hf3fs", ["written_at"]), ("redis", [])],
)
def test_the_times_are_shown_where_the_store_knows_them(
    backend: str,
    known: list[str],
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = store_of(backend)
    target = store.fill(range(1))

    _, facts = run_json(capsys, "inspect", target.id, hash_of(0), *store.flags)

    assert known == [name for name in ("written_at", "used_at") if name in facts]
    assert all(abs(_seconds(facts[name]) - time.time()) < 60 for name in known)
    main(["inspect", target.id, hash_of(0), *store.flags])
    assert len(known) == capsys.readouterr().out.count("s ago\n")


def test_a_page_is_named_by_its_first_digits(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = store.fill(range(20))

    code, facts = run_json(capsys, "inspect", target.id[:8], hash_of(1)[:12], *store.flags)

    assert (0, hash_of(1)) == (code, facts["hash"])
    assert main(["inspect", target.id[:8], "ffff", *store.flags]) == 2
    assert "has no page 'ffff'" in capsys.readouterr().err


def test_a_time_in_the_future_is_no_age(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1))
    ahead_s = time.time() + 7200
    for path in Path(file_store.config["path"]).glob("spaces/*/??/*"):
        os.utime(path, (ahead_s, ahead_s))

    main(["inspect", target.id, hash_of(0), *file_store.flags])

    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("written at")]
    assert line.endswith("from now: a clock is wrong")


def test_a_page_of_a_wrong_length_is_something_found(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1))
    for path in Path(file_store.config["path"]).glob("spaces/*/??/*"):
        os.truncate(path, 100)

    code, facts = run_json(capsys, "inspect", target.id, hash_of(0)[:8], *file_store.flags)

    assert (1, "wrong_size", False) == (code, facts["proof"], "frame" in facts)


@pytest.mark.parametrize("argv", [["ls"], ["inspect"], ["inspect", "SPACE"]])
def test_a_url_in_the_place_of_an_id_is_not_repeated(
    argv: list[str], file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(1))
    words = [target.id if word == "SPACE" else word for word in argv]

    assert main([*words, "redis://:TopSecret@host/0", *file_store.flags]) == 2
    assert "topsecret" not in capsys.readouterr().err.lower()
