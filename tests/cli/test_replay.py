"""`hicache replay` as users run it: output, exit codes, signals."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from event_streams import Subscriber
from replays import COMPLETE_PREFETCH, hits, replay_args, reported
from servers import free_port
from spans import Spans, is_child

from hicache_storage.cli import main, replay
from hicache_storage.cli.traces import read_requests
from hicache_storage.page_store.admission import NOT_ADMITTED_FIRST_USE, NOT_ADMITTED_RATE
from hicache_storage.registry import open_storage

_REPLAY = [
    *("replay", "--hicache-storage-backend", "memory"),
    *("--scale-bytes", "1/1024", "--host-size", "4MiB"),
]
_SHORT = [*_REPLAY, "--requests", "12"]
_COMMAND = [sys.executable, "-m", "hicache_storage.cli"]

_STORES = """
from hicache_backends.memory import MemoryStorage
class Failing(MemoryStorage):
    def batch_set(self, space, hashes, pages):
        raise OSError("the disk\\nis gone")
"""


def _report(tmp_path: Path, *argv: str) -> dict[str, Any]:
    return reported(tmp_path / "report.json", [*_SHORT, *argv])


def _catches(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _signalled(tmp_path: Path, number: int) -> tuple[int, str, str, dict[str, Any]]:
    """End a run of several hours by a signal. Return exit code, output, errors and figures."""
    file = tmp_path / "report.json"
    with subprocess.Popen(
        [*_COMMAND, *_SHORT, "--speed", "0.001", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline_s = time.monotonic() + 60
        while not _catches(
            process.pid, signal.SIGTERM
        ):  # only the replay installs a handler for it
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err, json.loads(file.read_text())


def test_only_the_table_is_printed_in_narrow_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(_SHORT) == 0

    printed = capfd.readouterr()
    assert printed.err == ""
    for shown in ("blocks", "pages", "tokens", "12 of 12 in", "corrupt pages        0;"):
        assert shown in printed.out
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


def test_json_has_the_figures_under_stable_names(tmp_path: Path) -> None:
    report = _report(tmp_path)

    expected = {
        *("backend", "trace", "trace_requests", "elapsed_s", "interrupted", "model"),
        *("page_tokens", "layout", "checksum", "prefetch_policy", "write_policy", "host_pages"),
        *("pools", "requests", "blocks", "pages", "tokens", "paired_pages", "l3_read", "l3_write"),
        *("prefetch", "loaded_unused_pages", "dropped_write_pages", "unreserved_pages"),
        *("verified_nbytes", "corrupt_pages", "controller", "store", "storage", "ranks"),
        *("faults", "swap", "unsaved_pages", "drained", "notes", "admission"),
        *("scale_bytes", "left_pages"),
    }
    assert expected == set(report)
    assert report["requests"] == report["trace_requests"] == 12
    assert report["interrupted"] is False


def _stored_pages(root: Path) -> int:
    with open_storage("file", {"path": str(root)}) as storage:
        return sum(len(list(storage.scan(space))) for space in storage.spaces())


def _report_on(root: Path, *argv: str) -> dict[str, Any]:
    flags = ("--scale-bytes", "1/1024", "--host-size", "4MiB", "--requests", "12", *argv)
    return reported(root / "report.json", replay_args("file", {"path": str(root)}, *flags))


def test_the_pages_of_a_run_are_removed_at_its_end(tmp_path: Path) -> None:
    assert 0 == _report_on(tmp_path)["left_pages"]
    assert 0 == _stored_pages(tmp_path)


def test_the_flags_can_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text(
        f"hicache-storage-backend: file\npage-size: 128\nhicache-write-policy: write_back\n"
        f"hicache-storage-backend-extra-config: {{path: {tmp_path}/kv}}\n"
    )
    flags = ("--scale-bytes", "1/1024", "--host-size", "4MiB", "--requests", "3")

    report = reported(
        tmp_path / "report.json", ["replay", "--config", str(tmp_path / "engine.yaml"), *flags]
    )

    assert ("file", 128, "write_back") == tuple(
        report[name] for name in ("backend", "page_tokens", "write_policy")
    )


def test_a_flag_beside_the_file_is_not_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.yaml").write_text("hicache-storage-backend: memory\n")

    config = str(tmp_path / "engine.yaml")
    assert main(["replay", "--config", config, "--page-size", "32"]) == 2
    assert "leave out --page-size" in capsys.readouterr().err


def test_pages_can_be_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = _report_on(tmp_path, "--keep")

    assert report["left_pages"] is None
    assert 2 * report["pages"]["misses"] == _stored_pages(tmp_path)
    assert "pages kept" in capfd.readouterr().out


def test_pages_of_an_earlier_run_stay_behind_a_gap(tmp_path: Path) -> None:
    _report_on(tmp_path, "--keep")
    with open_storage("file", {"path": str(tmp_path)}) as storage:
        for space in storage.spaces():
            hashes = [page.page_hash for page in storage.scan(space)][::9]
            storage.batch_delete(space, hashes)
    before = _stored_pages(tmp_path)

    assert 0 == _report_on(tmp_path)["left_pages"]

    assert before == _stored_pages(tmp_path)


def test_pages_that_cannot_be_removed_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = _report_on(tmp_path, "--faults", "delete:raise@100%")

    assert 2 * report["pages"]["misses"] == report["left_pages"]
    assert f"pages left           {report['left_pages']:,} could not" in capfd.readouterr().out


def test_hits_above_the_infinite_cache_are_explained(tmp_path: Path) -> None:
    cold = _report_on(tmp_path, "--keep")
    assert cold["notes"] == []

    warm = _report_on(tmp_path, "--hicache-storage-prefetch-policy", "wait_complete")

    assert warm["blocks"]["l2_hits"] + warm["blocks"]["l3_hits"] > warm["blocks"]["ideal_hits"]
    assert "from another run" in warm["notes"][0]


def test_the_scale_is_in_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert 1 / 1024 == _report(tmp_path)["scale_bytes"]
    assert "pages of 1/1024 of their real size" in " ".join(capfd.readouterr().out.split())


def test_flags_arrive(tmp_path: Path) -> None:
    report = _report(
        tmp_path,
        *("--model", "deepseek-v3", "--served-model-name", "mine", "--page-size", "128"),
        *("--hicache-write-policy", "write_back", "--checksum", "none"),
        *("--hicache-storage-prefetch-policy", "best_effort"),
        *("--hicache-mem-layout", "layer_first", "--scale-bytes", "1"),
        *("--host-size", "64MiB"),
    )

    assert report["model"] == "mine"
    assert report["page_tokens"] == 128
    assert report["write_policy"] == "write_back"
    assert report["prefetch_policy"] == "best_effort"
    assert report["layout"] == "layer_first"
    assert report["checksum"] == "none"
    assert [pool["name"] for pool in report["pools"]] == ["kv", "draft"]
    assert [pool["page_nbytes"] for pool in report["pools"]] == [128 * 61 * 1152, 128 * 1152]


def test_pools_can_be_given_one_by_one(tmp_path: Path) -> None:
    report = _report(
        tmp_path,
        *("--pool", "draft:mha,layers=1,heads=2,dim=8", "--pool", "kv:mla,layers=4,dim=16"),
        *("--scale-bytes", "1"),
    )

    assert [pool["name"] for pool in report["pools"]] == ["kv", "draft"]
    assert [pool["page_nbytes"] for pool in report["pools"]] == [
        64 * 4 * 16 * 2,
        64 * 2 * 2 * 8 * 2,
    ]


def test_the_same_seed_finds_the_same(tmp_path: Path) -> None:
    patient = ("--seed", "5", "--hicache-storage-prefetch-policy", "wait_complete")

    first = _report(tmp_path, *patient)

    assert first["pages"] == _report(tmp_path, *patient)["pages"]


def test_a_limit_cuts_the_trace_and_changes_no_request_before(tmp_path: Path) -> None:
    report = _report(tmp_path, "--requests", "100", "--scale-bytes", "1/8192")
    assert report["requests"] == 100
    longer = read_requests(_arguments("--requests", "300"))

    assert list(longer[:100]) == list(read_requests(_arguments("--requests", "100")))
    assert list(longer[:250]) == list(read_requests(_arguments())[:250])
    assert len(read_requests(_arguments("--requests", "1500"))) == 1500


def _arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return parser.parse_args(argv)


def test_key_spaces_in_the_report_are_those_of_the_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    report = _report(
        tmp_path,
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps({"path": str(store)})),
    )

    with open_storage("file", {"path": str(store)}) as storage:
        stored = {space.id for space in storage.spaces()}
    assert {pool["space"] for pool in report["pools"]} == stored
    assert {space for pool in report["pools"] for space in pool["spaces"]} == stored


def test_pages_that_a_full_store_refuses_are_in_the_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = _report(
        tmp_path, "--hicache-storage-backend-extra-config", '{"capacity_nbytes": "300KB"}'
    )

    refused = report["controller"]["unwritten_pages"]
    assert report["unsaved_pages"] == {"total": refused, "refused": refused}
    assert f"writes dropped       {refused:,} pages: {refused:,} refused" in capfd.readouterr().out


def test_pages_that_are_kept_for_the_end_are_in_the_figures(tmp_path: Path) -> None:
    report = _report(tmp_path, "--hicache-write-policy", "write_back", "--host-size", "64MiB")

    assert report["controller"]["written_pages"] == report["controller"]["committed_pages"] > 0
    assert report["l3_write"]["nbytes"] == report["store"]["save_nbytes"] > 0


def test_a_host_size_that_does_not_fit_names_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    total_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    assert main([*_SHORT, "--host-size", str(total_nbytes - (1 << 20))]) == 2
    error = capfd.readouterr().err
    assert "--host-size of" in error
    assert "give less" in error
    assert "slots" not in error


def test_a_trace_file_is_replayed(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [0, last]}
        for last in (1, 2, 1)
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    report = _report(tmp_path, "--trace", str(trace))

    assert report["blocks"]["total"] == 6
    assert report["blocks"]["l2_hits"] == report["blocks"]["ideal_hits"] == 3


def test_secrets_of_the_config_are_in_no_report(tmp_path: Path) -> None:
    config = json.dumps({"capacity_nbytes": 987654321})

    report = _report(tmp_path, "--hicache-storage-backend-extra-config", config)

    assert "987654321" not in json.dumps(report)


@pytest.fixture
def strange_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a module with misbehaving storages."""
    (tmp_path / "strange_stores.py").write_text(_STORES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def _replayed_over(storage: str, *argv: str) -> int:
    config = {"backend_name": "x", "module_path": "strange_stores", "class_name": storage}
    flags = ("--scale-bytes", "1/1024", "--host-size", "3MiB", *argv)
    return main(replay_args("dynamic", config, *flags))


def test_dynamic_finds_a_module_of_the_working_directory(tmp_path: Path) -> None:
    """README promises this for the installed command."""
    (tmp_path / "mine.py").write_text("from hicache_backends.memory import MemoryStorage as Mine\n")
    config = {"backend_name": "mine", "module_path": "mine", "class_name": "Mine"}

    done = subprocess.run(
        [
            Path(sys.executable).parent / "hicache",
            *replay_args("dynamic", config),
            *("--scale-bytes", "1/1024", "--host-size", "3MiB", "--requests", "1"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.usefixtures("strange_stores")
def test_a_failing_store_is_one_line_and_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    code = _replayed_over("Failing", "--requests", "12")

    printed = capfd.readouterr()
    assert code == 0
    assert "a storage call failed: the disk is gone\n" in printed.err
    assert all(line.startswith("hicache: warning: ") for line in printed.err.splitlines())
    assert printed.err.count("a storage call failed") == 1
    assert "save_error" in printed.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly_and_it_still_prints(tmp_path: Path, number: int) -> None:
    code, out, err, report = _signalled(tmp_path, number)

    assert code == 128 + number
    assert err == ""
    assert "then interrupted" in out
    assert "corrupt pages" in out
    assert report["interrupted"] is True
    assert report["requests"] < report["trace_requests"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_progress_bar_is_on_the_terminal_only(stream: str) -> None:
    """Standard error on a terminal shows the bar; standard output never does."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*_COMMAND, *_SHORT],
            env={**os.environ, "TERM": "xterm"},
            stdout=theirs if stream == "stdout" else subprocess.DEVNULL,
            stderr=theirs if stream == "stderr" else subprocess.DEVNULL,
        ) as process:
            os.close(theirs)
            shown = _everything(ours)
            assert process.wait(60) == 0
    finally:
        os.close(ours)

    assert ("replaying" in shown) == (stream == "stderr")


def _everything(descriptor: int) -> str:
    """Read from a pseudo-terminal until its other end is closed."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # Linux raises it when the other end is closed
            part = b""
        if not part:
            return b"".join(parts).decode()
        parts.append(part)


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = _handlers()

    _report(tmp_path)

    assert _handlers() == before


def _handlers() -> Sequence[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# `hicache replay` with rules for writes: what they save and cost, and that two runs agree.

_ADMISSION = replay_args(
    "memory",
    {"prefetch_threshold": 0},
    *COMPLETE_PREFETCH,
    *("--scale-bytes", "1/1024", "--host-size", "3MiB", "--conversations", "20"),
)
_SECOND_USE = ("--second-use",)
_RATE = ("--write-rate", "20KiB", "--write-burst", "1MiB")


def _figures(tmp_path: Path, *argv: str) -> dict[str, Any]:
    return reported(tmp_path / "report.json", [*_ADMISSION, *argv])


def _written(report: dict[str, Any]) -> int:
    pages: int = report["controller"]["written_pages"]
    return pages


def test_second_use_writes_less_and_finds_less(tmp_path: Path) -> None:
    plain, second = _figures(tmp_path), _figures(tmp_path, *_SECOND_USE)

    assert 0 < _written(second) < _written(plain)
    assert 0 < second["pages"]["l3_hits"] < plain["pages"]["l3_hits"]
    assert hits(second) < hits(plain)
    assert second["controller"][NOT_ADMITTED_FIRST_USE] >= _written(plain)
    assert 0 == second["corrupt_pages"] == second["unsaved_pages"]["total"]


def test_a_rate_writes_less(tmp_path: Path) -> None:
    plain, limited = _figures(tmp_path), _figures(tmp_path, *_RATE)

    assert 0 < _written(limited) < _written(plain)
    assert limited["controller"][NOT_ADMITTED_RATE] > 0
    assert hits(limited) < hits(plain)


@pytest.mark.parametrize("rules", [_SECOND_USE, _RATE, _SECOND_USE + _RATE], ids=len)
def test_hits_and_writes_do_not_depend_on_the_speed_of_the_machine(
    tmp_path: Path, rules: tuple[str, ...]
) -> None:
    names = ("missed_pages", "written_pages", NOT_ADMITTED_FIRST_USE, NOT_ADMITTED_RATE)
    first, again = (_figures(tmp_path, *rules)["controller"] for _ in range(2))

    assert [first.get(name) for name in names] == [again.get(name) for name in names]


def test_ranks_write_the_same_pages(tmp_path: Path) -> None:
    store = json.dumps({"path": str(tmp_path / "store"), "prefetch_threshold": 0})
    argv = [
        *("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", store),
        *("--scale-bytes", "1", "--pool", "kv:mha,layers=2,heads=2,dim=4"),
        *("--ranks", "2", "--requests", "40"),
    ]
    report = _figures(tmp_path, *_SECOND_USE, *argv)
    first, second = report["ranks"]["written_pages"]

    assert abs(first - second) <= 2  # each rank may have the page of its own sketch in addition
    assert first > 100


def test_the_rules_are_in_the_report(tmp_path: Path) -> None:
    report = _figures(tmp_path, *_SECOND_USE, "--remembered-pages", "5000", *_RATE)

    assert {
        "second_use": True,
        "remembered_pages": 5000,
        "write_nbytes_per_s": 20 << 10,
        "write_burst_nbytes": 1 << 20,
    } == report["admission"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--remembered-pages", "5000"), "--remembered-pages is for --second-use"),
        (("--write-burst", "1MiB"), "--write-burst is for --write-rate"),
        (("--second-use", "--remembered-pages", "5"), "remembered_pages"),
        (("--write-rate", "0"), "write_nbytes_per_s"),
    ],
)
def test_flags_that_do_not_fit_are_named(
    argv: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main([*_ADMISSION, *argv])
    assert message in capfd.readouterr().err


# `hicache replay` with faults and with a swap of backends: reports and refusals.

_DISRUPTED = [
    *("replay", "--hicache-storage-backend", "memory", "--conversations", "14"),
    *("--scale-bytes", "1/1024", "--host-size", "2MiB"),
]
_PLAN = (
    "exists:raise@2%,exists:lie@5%,exists:miss@5%,get:raise@2%,get:miss@5%,get:lie@5%,get:tear@5%,"
    "get:flip@5%,get:delay@5%,get:hang@1%,set:raise@2%,set:miss@5%,set:lie@5%,set:tear@5%,set:flip@5%,"
    "delete:raise@20%,seed=3,delay_s=0.001,hang_s=0.2"
)


def _disrupted(tmp_path: Path, *argv: str) -> dict[str, Any]:
    return reported(tmp_path / "report.json", [*_DISRUPTED, *argv])


def test_no_fault_of_any_kind_makes_a_byte_wrong(tmp_path: Path) -> None:
    report = _disrupted(tmp_path, "--faults", _PLAN)

    assert report["corrupt_pages"] == 0
    assert report["requests"] == report["trace_requests"]
    assert report["pages"]["l3_hits"] > 0
    assert report["faults"]["plan"] == _PLAN
    assert sum(report["faults"]["struck"].values()) > 20


def test_wrong_pages_are_reported_where_nothing_checks_them(tmp_path: Path) -> None:
    """The injected faults are real: without checksums, wrong bytes reach the engine."""
    file = tmp_path / "report.json"
    argv = ["--faults", "get:flip@100%", "--checksum", "none", "--json", str(file)]

    assert main([*_DISRUPTED, *argv]) == 1
    assert json.loads(file.read_text())["corrupt_pages"] > 0


def test_a_report_without_disruptions_has_none(tmp_path: Path) -> None:
    report = _disrupted(tmp_path)

    assert report["faults"] is None
    assert report["swap"] is None


def test_a_faulty_backend_is_exchanged_for_a_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"path": str(tmp_path / "store")})
    report = _disrupted(
        tmp_path,
        *("--swap-backend", "file", "--swap-extra-config", config, "--swap-after", "12", "--keep"),
        *("--faults", "get:raise@10%,set:flip@10%,seed=1"),
    )

    assert report["corrupt_pages"] == 0
    assert report["swap"]["backend"] == "file"
    assert report["swap"]["after_requests"] == 12
    assert report["swap"]["attached"]
    assert report["swap"]["store"]["load_ok"] > 0
    assert list((tmp_path / "store").glob("spaces/*/*/*"))
    assert "to file after 12 requests" in capfd.readouterr().out


def test_the_exchange_is_half_way_by_default(tmp_path: Path) -> None:
    report = _disrupted(tmp_path, "--swap-backend", "memory")

    assert report["swap"]["after_requests"] == report["trace_requests"] // 2


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--faults", "get:rise@5%"], "unknown fault 'rise'"),
        (["--swap-after", "3"], "--swap-after needs --swap-backend"),
        (["--swap-extra-config", "{}"], "--swap-extra-config needs --swap-backend"),
        (["--swap-backend", "memory", "--swap-after", "100000"], "give a smaller number"),
        (["--swap-backend", "memroy"], "did you mean 'memory'"),
        (["--swap-backend", "memory", "--swap-extra-config", '{"a": 1}'], "unknown field 'a'"),
    ],
)
def test_invalid_flags_are_refused(
    argv: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*_DISRUPTED, *argv]) == 2
    assert reason in capfd.readouterr().err


# `hicache replay --events-endpoint`.

_FIVE = replay_args(
    "memory",
    {"prefetch_threshold": 0},
    *COMPLETE_PREFETCH,
    *("--scale-bytes", "1/1024", "--host-size", "1MiB", "--conversations", "5"),
)


def test_pages_that_are_written_are_announced(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    batches: list[tuple[int, Any]] = []
    with Subscriber(endpoint, binds=True) as subscriber, ThreadPoolExecutor(1) as reader:
        first = reader.submit(subscriber.receive)
        report = reported(tmp_path / "report.json", [*_FIVE, "--events-endpoint", endpoint])
        batches.append(first.result(20))
        while batches[-1][0] < report["store"]["event_batches_sent"] - 1:
            batches.append(subscriber.receive())

    assert list(range(batches[0][0], batches[-1][0] + 1)) == [number for number, _ in batches]
    events = [event for _, (_, events, _) in batches for event in events]
    announced = {block for event in events for block in event["block_hashes"]}
    assert {("BlockStored", "STORAGE", 64)} == {
        (event["type"], event["medium"], event["block_size"]) for event in events
    }
    assert 0 < len(announced) <= report["controller"]["written_pages"]


@pytest.mark.parametrize("flags", [["--events-replay-endpoint", "tcp://*:5558"], ["--events-bind"]])
def test_flags_of_an_address_need_an_address(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_FIVE, *flags]) == 2

    assert f"{flags[0]} needs --events-endpoint" in capsys.readouterr().err


def test_an_address_of_this_machine_can_be_bound(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--events-endpoint", endpoint, "--events-bind")
    with Subscriber(endpoint, binds=False) as subscriber, ThreadPoolExecutor(1) as reader:
        first = reader.submit(subscriber.receive)
        reported(tmp_path / "report.json", [*_FIVE, "--speed", "2000", *flags])

        number, _ = first.result(20)
        assert number >= 0


# `hicache replay --tracing`.


def test_each_request_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    report = reported(tmp_path / "report.json", [*_FIVE, "--tracing"])

    prefetches = spans.named("hicache.prefetch")
    loads = spans.named("hicache.load")
    assert report["requests"] == len(prefetches)
    assert loads
    assert all(any(is_child(load, of) for of in prefetches) for load in loads)
    assert report["store"]["load_nbytes"] == sum(
        int(str((load.attributes or {})["hicache.nbytes"])) for load in loads
    )


def test_there_are_no_spans_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans.of_process(monkeypatch)

    reported(tmp_path / "report.json", _FIVE)

    assert [] == spans.named("hicache.prefetch")


def test_spans_that_go_nowhere_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reported(tmp_path / "report.json", [*_FIVE, "--tracing"])

    assert "hicache: warning: --tracing: spans go nowhere" in capsys.readouterr().err


def test_spans_of_a_provider_are_no_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spans.of_process(monkeypatch)

    reported(tmp_path / "report.json", [*_FIVE, "--tracing"])

    assert "--tracing" not in capsys.readouterr().err
