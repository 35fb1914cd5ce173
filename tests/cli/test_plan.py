"""`hicache plan` as users run it: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hicache_storage.cli import main

_PLAN = ["plan", "--conversations", "20"]
_PRICES = ["--prefill-rate", "8000", "--gpu-price", "2.5", "--host-price", "3"]


def _trace(path: Path, *ids: list[int]) -> Path:
    lines = (
        {"timestamp": 0, "input_length": 512 * len(each), "output_length": 1, "hash_ids": each}
        for each in ids
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_in_a_file_have_narrow_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*_PLAN, *_PRICES]) == 0

    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == ""
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    for shown in ("target alone", "unread", "net/month", "infinite cache", "best"):
        assert shown in printed.out


def test_columns_that_no_table_has_are_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_PLAN, "--storage-size", "0"]) == 0

    assert not {"unread", "read, write"} & {
        line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()
    }


def test_json_has_the_figures_under_stable_names(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"

    assert main([*_PLAN, *_PRICES, "--json", str(file)]) == 0

    report = json.loads(file.read_text())
    assert {
        *("trace", "requests", "duration_s", "model", "page_tokens", "write_policy", "blocks"),
        *("distinct_nbytes", "sample", "pools", "ideal_hit_rate", "l2_for_share_of_ideal"),
        *("l2_curve", "l3_curves", "options", "best", "notes"),
    } == set(report)
    assert {
        *("host_nbytes", "storage_nbytes", "l2_hit_rate", "l3_hit_rate", "hit_rate", "error"),
        *("l3_read", "l3_write", "written_pages", "unread_pages", "saved_tokens"),
        *("read_series", "write_series", "gpu_seconds", "gpus", "value_per_month"),
        *("cost_per_month", "net_per_month", "target_alone"),
    } == set(report["options"][0])


def test_a_page_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"

    assert main([*_PLAN, "--html", str(file)]) == 0

    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_flags_arrive(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    flags = [
        *("--model", "deepseek-v3", "--page-size", "128", "--hicache-write-policy", "write_back"),
        *("--host-size", "8GiB", "--host-size", "64GiB", "--storage-size", "0"),
        *("--storage-size", "1TiB", "--requests", "50", "--sample-above", "1000"),
    ]

    assert main([*_PLAN, *flags, "--json", str(file)]) == 0

    report = json.loads(file.read_text())
    assert 50 == report["requests"]
    assert 128 == report["page_tokens"]
    assert "write_back" == report["write_policy"]
    assert [128 * 61 * 1152, 128 * 1152] == [pool["page_nbytes"] for pool in report["pools"]]
    assert [(8, 0), (8, 1024), (64, 0), (64, 1024)] == [
        (option["host_nbytes"] >> 30, option["storage_nbytes"] >> 30)
        for option in report["options"]
    ]
    assert report["sample"] is not None


def test_a_trace_file_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = _trace(tmp_path / "t.jsonl", [1, 2], [1, 2], [1, 3])

    assert main(["plan", "--trace", str(trace)]) == 0

    assert "infinite cache  50.0 % of blocks" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host-size", "1KiB"], "--host-size of 1 KiB holds no block"),
        (["--host-size", "much"], "and EiB, not 'much'"),
        (["--page-size", "48"], "--page-size must divide"),
        (["--gpu-price", "2"], "--gpu-price needs --prefill-rate"),
        (["--prefill-rate", "0"], "must be a number greater than 0, not '0'"),
        (["--storage-price", "-1"], "--storage-price"),
        (["--trace", "missing.jsonl"], "missing.jsonl"),
        (["--json", "missing/plan.json"], "there is no directory missing"),
        (["--json", "-"], "--json -: name a file"),
        (["--html", "."], "--html .: is a directory"),
        (["--seed", "x"], "must be a whole number, not 'x'"),
        (["--scale-bytes", "0"], "must be a number like 1/64"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["plan", *flags]) == 2

    error = capfd.readouterr().err
    assert message in error
    assert 1 == error.count("\n")


def test_the_seed_is_for_the_synthetic_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(tmp_path / "t.jsonl", [1])

    assert main(["plan", "--trace", str(trace), "--seed", "1"]) == 2
    assert "--seed is for the synthetic trace" in capfd.readouterr().err


def test_a_trace_without_a_prompt_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(tmp_path / "t.jsonl", [])

    assert main(["plan", "--trace", str(trace)]) == 2
    assert "no request has a prompt" in capfd.readouterr().err


def test_each_tier_has_the_share_that_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    tiers = ["--host-size", "1GiB", "--tier", "nvme=2GiB", "--tier", "bucket=64GiB"]

    assert main([*_PLAN, *tiers, "--json", str(file)]) == 0

    report = json.loads(file.read_text())
    nvme, bucket = report["tiers"]
    small, large = report["options"]
    assert ("nvme", 2 << 30, "bucket", 64 << 30) == (
        *(nvme["name"], nvme["nbytes"]),
        *(bucket["name"], bucket["nbytes"]),
    )
    assert nvme["hit_rate"] + small["l2_hit_rate"] == pytest.approx(small["hit_rate"])
    assert bucket["hit_rate_so_far"] == large["hit_rate"]


def test_the_page_shows_tiers(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    tiers = ["--tier", "nvme=2GiB", "--tier", "bucket=64GiB"]

    assert main([*_PLAN, *tiers, "--html", str(file)]) == 0
    assert "Tiers of L3" in file.read_text()


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (["nvme=2GiB", "bucket=1GiB"], "--tier bucket must be larger than nvme"),
        (["nvme=2GiB", "nvme=4GiB"], "two tiers have the same name"),
        (["nvme"], "must be a tier such as nvme=4TiB, not 'nvme'"),
        (["nvme=0"], "must be at least one byte"),
    ],
)
def test_wrong_tiers_are_told(
    tiers: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [flag for tier in tiers for flag in ("--tier", tier)]

    assert main([*_PLAN, *flags]) == 2
    assert message in capsys.readouterr().err
