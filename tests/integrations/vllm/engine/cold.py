"""A prefix that one engine has written is served to a cold one, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import BLOCK, FULL, PROMPT, Answer, Engine


def write_and_read(
    config: dict[str, Any], read: Iterable[int] = PROMPT, **fields: Any
) -> tuple[Answer, Answer]:
    """Let one engine write `PROMPT`, and a cold one read `read`. Return the answers of both."""
    with Engine(config, **fields) as engine:
        written = engine.write(PROMPT)
    with Engine(config, **fields) as engine:
        answer = engine.write(read)
        assert engine.tier._metrics.errors == 0
    return written, answer


def test_a_cold_engine_gets_the_bytes_that_another_one_has_written(config: dict[str, Any]) -> None:
    written, answer = write_and_read(config)

    assert (written.computed, written.finished) == (0, True)
    assert (answer.computed, answer.wrong) == (FULL, 0)
    assert answer.sources == {"disk": FULL}


def test_a_longer_prompt_gets_the_prefix_that_is_there(file_config: dict[str, Any]) -> None:
    longer = [*PROMPT][:FULL] + [7] * 3 * BLOCK

    _, answer = write_and_read(file_config, longer)

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_a_prompt_that_differs_gets_the_common_prefix(file_config: dict[str, Any]) -> None:
    other = [*PROMPT][: 4 * BLOCK] + [7] * 3 * BLOCK

    _, answer = write_and_read(file_config, other)

    assert (answer.computed, answer.wrong) == (4 * BLOCK, 0)


@pytest.mark.parametrize("blocks", [2, 3])
def test_chunks_of_several_blocks(file_config: dict[str, Any], blocks: int) -> None:
    _, answer = write_and_read({**file_config, "blocks_per_chunk": blocks})

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_rows_hold_the_bytes_of_all_ranks(file_config: dict[str, Any]) -> None:
    _, answer = write_and_read(file_config, tp=2)

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_groups_with_a_sliding_window(file_config: dict[str, Any]) -> None:
    _, answer = write_and_read(file_config, window=2 * BLOCK)

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_groups_with_a_sliding_window_and_larger_chunks(file_config: dict[str, Any]) -> None:
    _, answer = write_and_read({**file_config, "blocks_per_chunk": 2}, window=2 * BLOCK)

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_a_window_whose_end_is_missing_is_no_hit_there(file_config: dict[str, Any]) -> None:
    with Engine(file_config, window=BLOCK) as engine:
        engine.write(PROMPT)
        spaces = engine.tier._groups.spaces
    window = next(space for space in spaces.values() if "SlidingWindow" in space.pool)
    with Engine(file_config, window=BLOCK) as engine:
        store = engine.tier._connection.store
        store.open_space(window)
        storage = store.storage
        hashes = [info.page_hash for info in storage.scan(store.framed(window))]
        assert store.delete(window, hashes) == len(hashes) > 0
        answer = engine.write(PROMPT)

    assert (answer.computed, answer.wrong) == (0, 0)


def test_a_config_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "fields.yaml").write_text(f"path: {tmp_path / 'pages'}\n")

    _, answer = write_and_read({"backend": "file", "config": f"@{tmp_path / 'fields.yaml'}"})

    assert answer.computed == FULL


def test_a_tier_alone_with_an_explicit_identity(tmp_path: Path) -> None:
    tier = {
        "type": "HiCacheTier",
        "module_path": "hicache_storage.integrations.vllm",
        "backend": "file",
        "config": {"path": str(tmp_path)},
        "identity": {"revision": "all that matters"},
    }
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}

    _, answer = write_and_read(extra, connector="OffloadingConnector", module=None)

    assert (answer.computed, answer.wrong, answer.sources) == (FULL, 0, {"disk": FULL})


def test_beside_another_tier_both_have_all_pages(
    tmp_path: Path, file_config: dict[str, Any]
) -> None:
    fs = {"type": "fs", "root_dir": str(tmp_path / "fs"), "n_read_threads": 1}
    fs["n_write_threads"] = 1
    with Engine({**file_config, "secondary_tiers": [fs]}) as engine:
        engine.write(PROMPT)
        assert [tier.tier_type for tier in engine.manager.secondary_tiers] == ["fs", "HiCacheTier"]

    with Engine(file_config) as engine:
        assert engine.write(PROMPT).computed == FULL


def test_two_engines_at_once_share_pages(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as first, Engine(file_config) as second:
        first.write(PROMPT)
        answer = second.write(PROMPT)

    assert (answer.computed, answer.wrong) == (FULL, 0)


def test_requests_of_one_prefix_at_once(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        engine.write(PROMPT)
    with Engine(file_config) as engine:
        asked = [engine.start(PROMPT) for _ in range(5)]
        engine.step_until(lambda: all(request.is_finished() for request in asked))
        assert engine.settle()
        assert [seen[1:] for seen in engine.workers.seen.values()] == [(FULL, 0)] * 5


def test_no_page_is_stored_twice(file_config: dict[str, Any]) -> None:
    """A page that was loaded is not written back."""
    with Engine(file_config) as engine:
        engine.write(PROMPT)
    with Engine(file_config) as engine:
        engine.write(PROMPT)
        assert engine.tier._connection.runner.stats().get("store_pages_ok", 0) == 0
