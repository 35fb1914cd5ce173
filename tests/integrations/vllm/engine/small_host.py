"""Prompts that vLLM's CPU tier has no room for: what is read, used, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_engine import BLOCK, PROMPT, Engine, requests, sampling

from hicache_storage.integrations.vllm import _metrics
from hicache_storage.request_log import Reason, RequestRecord
from hicache_storage.request_log.reading import LogReader, Selection

CHUNKS, ROW = 40, 12288


def prompt(n: int = 0) -> list[int]:
    return [50 + n] * BLOCK + [*range(1000, 1000 + (CHUNKS - 1) * BLOCK), 1]


def loads_of(engine: Engine) -> list[list[bytes]]:
    """Return a list that gets the keys of each load from now on."""
    loads: list[list[bytes]] = []
    submit = engine.tier.submit_load

    def submit_load(job: Any) -> None:
        loads.append(list(job.keys))
        submit(job)

    engine.tier.submit_load = submit_load
    return loads


def records_of(log: Path) -> list[RequestRecord]:
    return list(LogReader(log).records(Selection()))


def counted(engine: Engine, name: str) -> float:
    return sum(sum(stats["data"].get(name, {}).values()) for stats in engine.stats)


@pytest.mark.parametrize("rows", [20, 30, 39, 40, 41])
def test_a_prompt_begins_with_what_fits(
    file_config: dict[str, Any], tmp_path: Path, rows: int
) -> None:
    """Without an end, the last page would evict the first, which would be read again, and so on."""
    log = tmp_path / "explain.jsonl"
    with Engine({**file_config, "cpu_bytes_to_use": 1 << 23}) as engine:
        engine.write(prompt())
    fields = {**file_config, "cpu_bytes_to_use": rows * ROW, "explain_log": str(log)}
    with Engine(fields) as engine:
        loads = loads_of(engine)
        answer = engine.write(prompt())

    fits = min(rows, CHUNKS)
    assert (answer.finished, answer.computed, answer.wrong) == (True, fits * BLOCK, 0)
    assert [fits] == [len(keys) for keys in loads]
    (record,) = records_of(log)
    assert (record.asked_pages, record.hit_pages) == (CHUNKS, fits)
    assert record.unused_pages == CHUNKS - fits
    assert record.reason is (Reason.NO_HOST_SLOT if fits < CHUNKS else None)


def test_prompts_at_once_read_each_page_once_and_say_what_they_used(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "explain.jsonl"
    with Engine({**file_config, "cpu_bytes_to_use": 1 << 23}) as engine:
        for n in range(8):
            engine.write(prompt(n))
    fields = {**file_config, "cpu_bytes_to_use": 60 * ROW, "explain_log": str(log)}
    with Engine(fields) as engine:
        loads = loads_of(engine)
        asked = [engine.start(prompt(n)) for n in range(8)]
        engine.step_until(lambda: all(each.is_finished() for each in asked))
        assert engine.settle()
        used = sum(engine.workers.seen[each.request_id][1] // BLOCK for each in asked)

    assert sum(len(keys) for keys in loads) <= 8 * CHUNKS
    records = records_of(log)
    assert (len(records), sum(record.hit_pages for record in records)) == (8, used)
    assert sum(record.unused_pages for record in records) == 8 * CHUNKS - used


def test_pages_that_leave_before_their_request_begins_are_counted(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "explain.jsonl"
    with Engine(file_config) as engine:
        engine.write(PROMPT)
    with Engine({**file_config, "explain_log": str(log)}) as engine:
        loads = loads_of(engine)
        asked = engine.start(PROMPT)
        engine.step_until(lambda: bool(loads))
        engine.tier._connection.runner.drain()
        engine.manager._process_finished_jobs()
        first, *others = loads[0]
        ((evicted, _),) = engine.manager.primary_tier._policy.evict(1, set(others))
        assert evicted == first
        engine.manager.primary_tier._num_evictable_cache_chunks -= 1
        engine.step_until(asked.is_finished)
        assert engine.settle()
        engine.tier._metrics._taken_s = 0
        engine.write(range(7, 7 + 2 * BLOCK))

        assert len(loads) == 1
        assert engine.workers.seen[asked.request_id][1:] == (0, 0)
        assert counted(engine, _metrics.UNUSED_LOADS) == 6
    (record,) = [each for each in records_of(log) if each.request == asked.request_id]
    assert (record.hit_pages, record.unused_pages, record.page) == (0, 6, 0)
    assert record.reason is Reason.EVICTED


def test_a_preempted_request_loads_its_pages_again(file_config: dict[str, Any]) -> None:
    """The GPU has room for the prompts of two requests, but not for what they generate."""

    def small_gpu(vllm_config: Any) -> None:
        vllm_config.cache_config.num_gpu_blocks_override = 15

    with Engine(file_config) as engine:
        engine.write(PROMPT)
        engine.write([5, *PROMPT][:-1])
    with Engine(file_config, edit=small_gpu, max_model_len=13 * BLOCK) as engine:
        loads = loads_of(engine)
        asked: list[Any] = []
        for tokens in ([*PROMPT], [5, *PROMPT][:-1]):
            asked.append(
                requests.Request(
                    f"long{len(asked)}",
                    tokens,
                    sampling.SamplingParams(max_tokens=2 * BLOCK, ignore_eos=True),
                    None,
                    block_hasher=engine.core.request_block_hasher,
                )
            )
            engine.core.add_request(asked[-1])
        engine.step_until(lambda: asked[1].num_preemptions > 0)
        assert [6, 6] == [len(keys) for keys in loads]
        engine.manager.primary_tier.reset_cache()
        engine.step_until(asked[1].is_finished)  # the GPU still has some of its pages

    (again,) = loads[2:]
    assert set(again) <= set(loads[1])
