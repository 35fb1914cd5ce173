"""A replay can read a recorded trace: its blocks have 512 tokens and the hash of their last page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pages import hash_of
from servers import wait_until

from hicache_storage.errors import ConfigError
from hicache_storage.replay.trace import InfiniteCache, Request, read_trace
from hicache_storage.request_log import TraceRecorder, TraceSettings, open_trace
from hicache_storage.request_log.log_file import LogFile
from hicache_storage.request_log.trace import block_id

HASHES = [hash_of(number) for number in range(40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def recorder(path: Path, page_tokens: int = 64) -> TraceRecorder:
    found = open_trace(TraceSettings(trace=str(path)), page_tokens, engine="test")
    assert found is not None
    return found


def recorded(path: Path, *prompts: Sequence[str], page_tokens: int = 64) -> list[Request]:
    trace = recorder(path, page_tokens)
    for prompt in prompts:
        trace.record(prompt)
    trace.close()
    assert trace.dropped_requests == 0
    return read_trace(path)


def test_a_block_has_the_pages_of_512_tokens(path: Path) -> None:
    (request,) = recorded(path, HASHES[:20])

    assert request.input_tokens == 20 * 64
    assert request.blocks == tuple(block_id(HASHES[last]) for last in (7, 15, 19))


def test_prompts_of_one_prefix_have_equal_blocks_up_to_where_they_differ(path: Path) -> None:
    first, second = recorded(path, HASHES[:24], [*HASHES[:16], *HASHES[30:38]])

    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]


def test_a_prompt_that_goes_on_has_another_last_block(path: Path) -> None:
    first, second = recorded(path, HASHES[:12], HASHES[:16])

    cache = InfiniteCache()
    assert [cache.hits(first), cache.hits(second)] == [0, 1]


@pytest.mark.parametrize(("page_tokens", "blocks"), [(16, 2), (512, 40), (1024, 80)])
def test_pages_of_other_sizes(path: Path, page_tokens: int, blocks: int) -> None:
    (request,) = recorded(path, HASHES, page_tokens=page_tokens)

    assert len(set(request.blocks)) == blocks
    assert request.input_tokens == 40 * page_tokens


def test_hashes_in_bytes_and_in_digits_are_the_same_block() -> None:
    assert block_id(bytes.fromhex(HASHES[3])) == block_id(HASHES[3]) < 2**54


def test_a_prompt_without_a_full_page_is_left_out(path: Path) -> None:
    assert len(recorded(path, [], HASHES[:1])) == 1


def test_lines_are_in_order_where_the_clock_goes_back(path: Path) -> None:
    times = iter([5_000_000_000, 3_000_000_000, 6_000_000_000])
    trace = TraceRecorder(LogFile(path, 1 << 20, alone=True), 64, clock=lambda: next(times))
    for _ in range(3):
        trace.record(HASHES[:8])
    trace.close()

    assert [request.arrival_s for request in read_trace(path)] == [5, 5, 6]


def test_a_line_holds_hashes_and_lengths_alone(path: Path) -> None:
    recorded(path, HASHES[:8])

    (line,) = path.read_text().splitlines()
    assert set(json.loads(line)) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_two_recorders_of_one_file_do_not_mix_their_requests(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = recorder(path), recorder(path)
    first.record(HASHES[:8])
    wait_until(lambda: path.read_text() != "")
    second.record(HASHES[:8])
    second.close()
    first.close()

    assert len(read_trace(path)) == 1
    assert second.dropped_requests == 1
    assert "cannot be written" in caplog.text


def test_a_page_that_fills_no_block_is_an_error_of_the_config(path: Path) -> None:
    with pytest.raises(ConfigError, match="test: trace: a trace has blocks of 512 tokens"):
        recorder(path, page_tokens=48)


def test_a_file_that_cannot_be_written_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"test: trace: .*cannot be written"):
        recorder(tmp_path / "missing" / "trace.jsonl")


def test_without_a_file_there_is_no_trace() -> None:
    assert open_trace(TraceSettings(), 64, engine="test") is None
