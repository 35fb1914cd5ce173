"""`hicache replay --events-endpoint`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from event_streams import Subscriber
from replays import COMPLETE_PREFETCH, replay_args, reported
from servers import free_port

from hicache_storage.cli import main

if TYPE_CHECKING:
    from pathlib import Path

_REPLAY = replay_args(
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
        report = reported(tmp_path / "report.json", [*_REPLAY, "--events-endpoint", endpoint])
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
    assert main([*_REPLAY, *flags]) == 2

    assert f"{flags[0]} needs --events-endpoint" in capsys.readouterr().err


def test_an_address_of_this_machine_can_be_bound(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--events-endpoint", endpoint, "--events-bind")
    with Subscriber(endpoint, binds=False) as subscriber, ThreadPoolExecutor(1) as reader:
        first = reader.submit(subscriber.receive)
        reported(tmp_path / "report.json", [*_REPLAY, "--speed", "2000", *flags])

        number, _ = first.result(20)
        assert number >= 0
