"""The explain log and the trace of vLLM's engine core: one record and one line for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import BLOCK, FULL, PROMPT, Engine

from hicache_storage.cli import main
from hicache_storage.errors import ConfigError
from hicache_storage.replay.trace import read_trace
from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.reading import LogReader, Selection

LONG = range(1000, 1000 + 62 * BLOCK + 3)
"""A prompt of one block of a trace, which is 32 pages, and 30 further pages."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "explain.jsonl"


@pytest.fixture
def logged(file_config: dict[str, Any], log: Path) -> dict[str, Any]:
    return {**file_config, "explain_log": str(log), "lookup_timeout_s": 30}


def records_of(log: Path, **selection: Any) -> list[RequestRecord]:
    return list(LogReader(log).records(Selection(**selection)))


def test_a_hit_and_a_longer_prompt_are_told(logged: dict[str, Any], log: Path) -> None:
    with Engine(logged) as engine:
        engine.write(PROMPT)
    with Engine(logged) as engine:
        engine.write([*PROMPT][:FULL] + [7] * 2 * BLOCK)

    (cold,) = records_of(log, request="r1")[:1]
    (warm,) = records_of(log, request="r1")[1:]

    assert (cold.operation, cold.engine) == (Operation.PREFETCH, "vllm")
    assert (cold.hit_pages, cold.page, cold.reason) == (0, 0, Reason.ABSENT)
    assert (warm.hit_pages, warm.page, warm.reason) == (6, 6, Reason.ABSENT)
    assert warm.pool == "group_0.FullAttentionSpec"
    assert cold.page_hash == warm.first_hash
    assert warm.elapsed_s is not None
    assert 0 < warm.elapsed_s < 20


def test_a_page_that_is_wrong_when_it_is_loaded_is_told_by_its_check(
    logged: dict[str, Any], log: Path
) -> None:
    with Engine(logged) as engine:
        asked = engine.start(PROMPT)
        engine.step_until(asked.is_finished)
        assert engine.settle()
        engine.forget_host()
        third = asked.block_hashes[2].hex()
        page = next(path for path in log.parent.rglob(f"*{third}*") if path.is_file())
        data = bytearray(page.read_bytes())
        data[-100] ^= 1
        page.write_bytes(data)
        answer = engine.write(PROMPT)

    (record,) = records_of(log, request="r2")
    assert (answer.computed, answer.wrong) == (2 * BLOCK, 0)
    assert (record.page, record.page_hash, record.reason) == (2, third, Reason.CORRUPT)


def test_a_store_that_hangs_is_a_time_out_in_the_log(logged: dict[str, Any], log: Path) -> None:
    with Engine({**logged, "lookup_timeout_s": 0.2}) as engine:
        store = engine.tier._connection.store
        engine.write(PROMPT)
        engine.forget_host()
        lookup = store.begin_lookup

        def hang(queries: Any, *, timeout_s: float) -> Any:
            return lookup(queries, timeout_s=0)

        store.begin_lookup = hang
        engine.write(PROMPT)

    (record,) = records_of(log, request="r2")
    assert (record.hit_pages, record.reason) == (0, Reason.TIMEOUT)


def test_pages_that_are_not_admitted_are_told_with_their_request(
    logged: dict[str, Any], log: Path
) -> None:
    with Engine({**logged, "admission": {"second_use": True}}) as engine:
        engine.write(PROMPT)

    (record,) = (one for one in records_of(log) if one.operation is Operation.STORE)
    assert (record.request, record.reason) == ("r1", Reason.NOT_ADMITTED)
    assert (record.asked_pages, record.hit_pages) == (6, 0)


def test_no_story_is_left_behind(logged: dict[str, Any]) -> None:
    with Engine(logged) as engine:
        for _ in range(3):
            engine.write(PROMPT)
            engine.forget_host()
        assert engine.tier._lookups._requests == {}


def test_the_log_holds_no_token(logged: dict[str, Any], log: Path) -> None:
    with Engine(logged) as engine:
        engine.write(PROMPT)

    for line in log.read_text().splitlines():
        assert not {"tokens", "prompt", "token_ids"} & set(json.loads(line))
        assert "[" not in line


def test_a_log_that_cannot_be_written_is_refused(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"explain_log: .*cannot be written"):
        Engine({**file_config, "explain_log": str(tmp_path / "missing" / "log.jsonl")})


# --- the trace --------------------------------------------------------------------------------------


def test_a_trace_of_the_requests_is_what_a_plan_reads(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    with Engine({**file_config, "trace": str(trace)}) as engine:
        for prompt in (LONG, LONG, [*LONG][: 32 * BLOCK] + [7] * 32 * BLOCK, range(5)):
            engine.write(prompt)

    first, second, third = read_trace(trace)
    assert first.blocks == second.blocks
    assert first.blocks[0] == third.blocks[0] != third.blocks[1]
    assert (first.input_tokens, third.input_tokens) == (62 * BLOCK, 64 * BLOCK)

    plan = tmp_path / "plan.json"
    assert main(["plan", "--trace", str(trace), "--json", str(plan), "--host-size", "1GiB"]) == 0
    (option,) = json.loads(plan.read_text())["options"]
    assert option["l2_hit_rate"] == pytest.approx(3 / 6)


def test_a_trace_has_the_requests_that_no_tier_was_asked_for(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    """The GPU's cache has all pages of the second request."""
    trace = tmp_path / "trace.jsonl"
    with Engine({**file_config, "trace": str(trace)}) as engine:
        engine.write(LONG)
        engine.ask(LONG)

    assert len(read_trace(trace)) == 2
