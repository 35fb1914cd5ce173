"""Admission of writes below SGLang's own cache controller."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from servers import wait_until
from sglang_engine import MORE, TOKENS, WINDOW, Engine, PoolPlan, engine_world, hashes_of

from hicache_storage.page_store.sketch_store import POOL as SKETCH_POOL


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


def admitting(config: dict[str, Any], **admission: Any) -> dict[str, Any]:
    return {**config, "adapter": {"admission": {"remembered_pages": 1000, **admission}}}


@pytest.mark.parametrize("v1", [0, 1])
def test_a_node_is_stored_at_its_second_backup(v1: int, file_config: dict[str, Any]) -> None:
    config = admitting({**file_config, "interface_v1": v1}, second_use=True)
    with Engine([PoolPlan()], config) as engine:
        engine.fill(1)
        first = engine.write(TOKENS)
        assert engine.read(MORE).hits == 0
        second = engine.write(TOKENS)

        assert (8, 8) == (first.pages, second.pages)  # SGLang ends a backup at a page that failed
        assert 8 == engine.storage.counters()["not_admitted_first_use"]
        read = engine.read(MORE)
        assert 8 == read.pages
        assert [second.held] == [read.held]


def test_only_the_new_pages_of_a_longer_node_are_kept_out(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], admitting(file_config, second_use=True)) as engine:
        engine.fill(1)
        engine.write(TOKENS[: len(TOKENS) // 2])
        engine.write(TOKENS)

        assert 4 == engine.read(MORE).pages


def test_admitted_pages_between_others_are_one_call(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine([PoolPlan()], admitting(file_config, second_use=True)) as engine:
        engine.fill(1)
        pool, transport = engine.storage._pools.all()[0], engine.storage._transport
        calls: list[list[str]] = []
        save = transport.store.save

        def counted(transfers: Sequence[Any], **options: Any) -> Any:
            if transfers[0].space.pool != SKETCH_POOL:  # a thread stores the sketch at any time
                calls.append(list(transfers[0].hashes))
            return save(transfers, **options)

        monkeypatch.setattr(transport.store, "save", counted)
        keys, indices = hashes_of(TOKENS), torch.arange(len(TOKENS))
        transport.save(pool, keys[::2], indices[: len(TOKENS) // 2])
        moved = transport.save(pool, keys, indices).moved
        held = engine.bytes_at(pool.name, indices)
        engine.wipe()
        loaded = transport.load(pool, keys, indices).moved

        assert [keys[::2]] == calls
        assert [True] * len(keys) == moved
        assert [True, False] * (len(keys) // 2) == loaded
        assert held[::2] == engine.bytes_at(pool.name, indices)[::2]


def test_side_pools_are_stored_with_their_node(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], admitting(file_config, second_use=True)) as engine:
        engine.fill(1)
        engine.write(TOKENS)
        assert engine.read(MORE).hits == 0
        written = engine.write(TOKENS)
        read = engine.read(MORE)

        assert 8 == read.pages
        assert {name: pages[-len(read.held[name]) :] for name, pages in written.held.items()} == (
            read.held
        )


def test_the_next_server_knows_the_backups_of_the_one_before(file_config: dict[str, Any]) -> None:
    config = admitting(file_config, second_use=True)
    with Engine([PoolPlan()], config) as engine:
        engine.write(TOKENS)
    with Engine([PoolPlan()], config) as engine:
        wait_until(lambda: any(pages for _, pages in engine.storage._admission._admission.states()))
        engine.write(TOKENS)

        assert 8 == engine.read(MORE).hits


def test_the_rate_stores_the_first_pages(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        page_nbytes = engine.storage._pools.all()[0].page_nbytes
    limits = {"write_nbytes_per_s": 1, "write_burst_nbytes": 3 * page_nbytes}
    config = {**admitting(file_config, **limits), "path": file_config["path"] + "-limited"}
    with Engine([PoolPlan()], config) as engine:
        written = engine.write(TOKENS)

        assert 8 == written.pages
        assert 3 == engine.read(MORE).hits
        assert 5 == engine.storage.counters()["not_admitted_rate"]
