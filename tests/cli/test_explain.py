"""`hicache explain` as an operator types it, over a replay's log and over records of engines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pages import hash_of

from hicache_storage.cli import main
from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.records import dropped_line

STORE = '{"path": "pages", "capacity_nbytes": "4MiB"}'
REPLAY = [
    *("replay", "--conversations", "6", "--seed", "1", "--scale-bytes", "1/1024"),
    *("--host-size", "1MiB", "--hicache-storage-backend", "file"),
    *("--hicache-storage-backend-extra-config", STORE, "--explain-log", "log.jsonl"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
]


@pytest.fixture(autouse=True)
def workplace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["explain", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def write(path: Path, *records: RequestRecord) -> None:
    path.write_text("".join(record.line() for record in records))


def record(**fields: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "at_s": 1_000_000_000.0,
        "engine": "vllm",
        "rank": 0,
        "operation": Operation.PREFETCH,
        "asked_pages": 9,
        "hit_pages": 4,
    }
    return RequestRecord(**{**known, **fields})


def test_a_replay_writes_a_record_of_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REPLAY, "--json", "figures.json"]) == 0
    code, text, _ = explain(capsys, "log.jsonl", "--json")
    counted = json.loads(Path("figures.json").read_text())["controller"]

    told = json.loads(text)
    assert code == 0
    assert told["dropped_records"] == told["unreadable_lines"] == 0
    assert ("prefetch", "absent") in {
        (each["operation"], each["reason"]) for each in told["reasons"]
    }
    assert told["hit_pages"] == counted["l2_hit_pages"] + counted["l3_hit_pages"]
    assert told["l2_pages"] == counted["l2_hit_pages"]
    assert told["asked_pages"] - told["hit_pages"] == counted["missed_pages"]


def test_a_summary_fits_80_columns_and_names_each_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *(record(reason=reason, page=4) for reason in Reason), record(hit_pages=9))
    with path.open("a", encoding="utf-8") as file:
        file.write(dropped_line(12, 1.0, "vllm", 0))

    code, text, _ = explain(capsys, "log.jsonl")

    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for reason in Reason:
        assert reason.name.lower().replace("_", " ") in text
    assert f"{len(Reason) + 1} records from 2001-09-09T01:46:40Z" in text
    assert "1 record has every page" in text
    assert "12 records were dropped" in text


def test_the_story_of_a_request_is_in_plain_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = record(
        request="chat-7",
        page=4,
        page_hash=hash_of(4),
        pool="draft",
        reason=Reason.WRONG_KEY,
        reasons={Reason.WRONG_KEY: 2, Reason.TIMEOUT: 3},
        l2_pages=1,
        elapsed_s=0.0123,
    )
    write(tmp_path / "log.jsonl", record(request="chat-6"), wrong)

    code, text, _ = explain(capsys, "log.jsonl", "--request", "chat-7")

    assert code == 0
    assert text == (
        "2001-09-09T01:46:40Z  vllm, rank 0: prefetch of request 'chat-7'\n"
        "  4 of 9 pages were usable (1 from host memory, 3 from storage), after 12.3 ms\n"
        f"  page 4 of pool 'draft' ({hash_of(4)[:16]}) had the header of another page in storage,"
        " and was deleted there\n"
        "  missing pages by reason: 2 wrong key, 3 timeout\n"
    )


def test_a_prefix_that_another_rank_cut_names_the_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(
        tmp_path / "log.jsonl", record(request="r", page=4, reason=Reason.OTHER_RANK, other_rank=2)
    )

    _, text, _ = explain(capsys, "log.jsonl", "--request", "r")

    assert text.endswith("  page 4 is missing on another rank (rank 2)\n")


def test_the_records_of_a_page_tell_its_history(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page_hash = hash_of(3)
    write(
        tmp_path / "log.jsonl",
        record(
            operation=Operation.STORE,
            hit_pages=0,
            page=0,
            page_hash=page_hash,
            reason=Reason.NOT_ADMITTED,
        ),
        record(first_hash=page_hash, page=0, page_hash=page_hash, reason=Reason.ABSENT),
        record(first_hash=hash_of(9)),
    )

    code, text, _ = explain(capsys, "log.jsonl", "--hash", page_hash[:12].upper())

    assert code == 0
    assert text.count("rank 0") == 2
    assert "was not written: the admission rules keep it out of the store" in text
    assert f"prefetch of pages from {page_hash[:16]}" in text


def test_a_request_that_is_not_there_is_found_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "log.jsonl", record(request="chat-7"))

    code, text, _ = explain(capsys, "log.jsonl", "--request", "chat-8")

    assert code == 1
    assert text.startswith("No record matches.")
    assert explain(capsys, "log.jsonl", "--request", "chat-8", "--json")[0] == 1


def test_since_leaves_older_records_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    now_s = time.time()
    write(tmp_path / "log.jsonl", record(at_s=now_s - 7200), record(at_s=now_s - 60))

    _, text, _ = explain(capsys, "log.jsonl", "--since", "1h", "--json")

    assert json.loads(text)["records"] == 1


def test_an_empty_log_is_no_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").touch()

    assert explain(capsys, "log.jsonl") == (0, "There are no records.\n", "")


def test_a_file_that_is_no_log_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text('{\n  "a": 1\n}\n')

    for flags in ([], ["--request", "r"], ["--json"]):
        code, told, error = explain(capsys, "log.jsonl", *flags)
        assert (2, "") == (code, told)
        assert "log.jsonl: is not an explain log" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: cannot be read: No such file or directory"),
        (["log.jsonl", "--hash", "xyz"], "--hash: must be at least the first four"),
        (["log.jsonl", "--since", "soon"], "must be a time like 100ms, 90s"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").touch()

    code, _, error = explain(capsys, *arguments)

    assert code == 2
    assert message in error
    assert error.count("\n") == 1
