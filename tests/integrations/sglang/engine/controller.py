"""The backends below SGLang's own cache controller and its threads, byte for byte.

SGLang has an environment of its own, so `make test-sglang` runs these tests.
"""

from __future__ import annotations

from collections.abc import Generator
from importlib import metadata
from typing import Any

import pytest
import torch
from sglang_engine import (
    DRAFT,
    MORE,
    PAGE_TOKENS,
    TOKENS,
    WINDOW,
    Engine,
    HybridCacheController,
    PoolName,
    PoolPlan,
    engine_world,
    hashes_of,
    write_and_read,
)

from hicache_storage.integrations.sglang import _stored_pool

BEFORE_0_5_23 = metadata.version("sglang") < "0.5.23"
LAYOUTS = [
    *(
        ("mha", layout)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    *(("mla", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
]


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


@pytest.mark.parametrize("v1", [0, 1])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_cold_engine_reads_the_pages_of_another(
    kind: str, layout: str, v1: int, file_config: dict[str, Any]
) -> None:
    plan = PoolPlan(kind=kind, layout=layout)
    with (
        Engine([plan], {**file_config, "interface_v1": v1}) as writer,
        Engine([plan], {**file_config, "interface_v1": v1}) as reader,
    ):
        write_and_read(writer, reader)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_the_pages_of_a_slot_are_made_once(layout: str, file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(layout=layout)], file_config) as engine:
        pool = engine.storage._pools.all()[0]
        keys, indices = hashes_of(TOKENS), torch.arange(len(TOKENS))
        saved = pool.sources(keys, indices)[0].pages
        loaded = pool.targets(keys, indices)[0].pages

        assert len(keys) == len(saved)
        assert all(one is other for one, other in zip(saved, loaded, strict=True))


def test_slots_beyond_the_limit_get_pages_of_the_same_memory(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stored_pool, "_MAX_KEPT_PAGES", 0)
    with Engine([PoolPlan()], file_config) as engine:
        pool = engine.storage._pools.all()[0]
        keys, indices = hashes_of(TOKENS), torch.arange(len(TOKENS))
        first, second = (pool.sources(keys, indices)[0].pages for _ in range(2))

        assert not any(one is other for one, other in zip(first, second, strict=True))
        assert [page.addresses for page in first] == [page.addresses for page in second]


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_and_values_of_two_widths(layout: str, file_config: dict[str, Any]) -> None:
    plan = PoolPlan(kind="asymmetric", layout=layout)
    with Engine([plan], file_config) as writer, Engine([plan], file_config) as reader:
        write_and_read(writer, reader)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_moved_in_place_and_by_copy_are_the_same(
    kind: str, layout: str, file_config: dict[str, Any]
) -> None:
    plan = PoolPlan(kind=kind, layout=layout)
    with (
        Engine([plan], file_config) as writer,
        Engine([plan], {**file_config, "interface_v1": 0}) as reader,
    ):
        write_and_read(writer, reader)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_target_draft_and_window_together(kind: str, config: dict[str, Any]) -> None:
    plans = [PoolPlan(kind=kind), WINDOW]
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine(plans, config, late=[DRAFT]) as writer,
        Engine(plans, config, late=[DRAFT]) as reader,
    ):
        write_and_read(writer, reader)


def test_a_prefix_without_its_draft_is_no_hit(file_config: dict[str, Any]) -> None:
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine([PoolPlan()], file_config) as plain,
        Engine([PoolPlan()], file_config, late=[DRAFT]) as speculative,
    ):
        plain.write(TOKENS)
        assert speculative.read(TOKENS).hits == 0
        speculative.write(TOKENS)
        assert speculative.read(TOKENS).pages == 8


def test_a_window_shortens_the_prefix_to_where_it_is_whole(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], file_config) as engine:
        engine.write(TOKENS[: 4 * PAGE_TOKENS])
        written = engine.write(TOKENS)
        side = {"keys": ["__placeholder__"] * 2, "hit_policy": "trailing_pages", "name": "swa"}
        transfer = type("Transfer", (), side)
        result = engine.storage.batch_exists_v2(written.hashes, [transfer])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [4, 8])
        shorter = engine.storage.batch_exists_v2(written.hashes[:7], [transfer])
        assert (shorter.kv_hit_pages, shorter.restorable_prefix_pages) == (4, [4])


def test_a_node_of_more_pages_than_a_batch(file_config: dict[str, Any]) -> None:
    long = list(range(300 * PAGE_TOKENS))
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine([PoolPlan()], file_config, late=[DRAFT], pages=310) as writer,
        Engine([PoolPlan()], file_config, late=[DRAFT], pages=310) as reader,
    ):
        writer.fill(1)
        written = writer.write(long)
        read = reader.read(long)
        assert (written.pages, read.pages) == (300, 300)
        assert read.held == written.held


@pytest.mark.skipif(
    BEFORE_0_5_23, reason="0.5.22 selects the writing ranks before it opens the storage"
)
def test_every_rank_has_draft_heads_of_its_own_beside_shared_latents(
    file_config: dict[str, Any],
) -> None:
    draft = PoolPlan(name=PoolName.DRAFT, layers=1, heads=2)
    held: list[Any] = []
    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=2, speculative_draft_model_path="org/draft"),
            Engine([PoolPlan(kind="mla")], file_config, late=[draft]) as engine,
        ):
            engine.fill(1)  # all ranks get the same latents and different draft heads
            engine.host(PoolName.DRAFT).kv_buffer.fill_(rank + 1)
            held.append(engine.write(TOKENS).held)
    assert held[0][PoolName.DRAFT] != held[1][PoolName.DRAFT]

    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=2, speculative_draft_model_path="org/draft"),
            Engine([PoolPlan(kind="mla")], file_config, late=[draft]) as engine,
        ):
            read = engine.read(TOKENS)
            assert read.pages == 8
            assert read.held == held[rank]


@pytest.mark.parametrize("late", [[], [PoolPlan(name=PoolName.DRAFT, layers=1, heads=2)]])
def test_every_context_parallel_rank_finds_what_it_wrote(
    late: list[PoolPlan], file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang elects one writer of MLA among all ranks, but each of these ranks has pages of its own."""
    held: list[Any] = []
    for again in (False, True):
        for rank in (0, 1):

            def place(*_: object, at: int = rank) -> tuple[int, int]:
                return at, 2

            monkeypatch.setattr(HybridCacheController, "get_attn_cp_rank_and_size", place)
            with engine_world(tp_rank=rank, tp_size=2, speculative_draft_model_path="org/draft"):
                if BEFORE_0_5_23:
                    with pytest.raises(Exception, match="use SGLang"):
                        Engine([PoolPlan(kind="mla")], file_config, late=late)
                    continue
                with Engine([PoolPlan(kind="mla")], file_config, late=late) as engine:
                    if again:
                        read = engine.read(TOKENS)
                        assert (read.hits, read.pages) == (8, 8)
                        assert read.held == held[rank]
                    else:
                        engine.fill(rank + 1)
                        held.append(engine.write(TOKENS).held)


def test_ranks_of_two_sizes_share_pages_by_head_groups(file_config: dict[str, Any]) -> None:
    config = {**file_config, "tp_lcm_size": 4}
    with engine_world(tp_size=2), Engine([PoolPlan(layout="page_head", heads=4)], config) as two:
        two.fill(1)
        written = two.write(TOKENS)
        assert written.pages == 8
    halves: list[list[bytes]] = []
    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=4),
            Engine([PoolPlan(layout="page_head", heads=2)], config) as four,
        ):
            read = four.read(TOKENS)
            assert read.pages == 8
            halves.append(read.held[PoolName.KV])
    for page, *parts in zip(written.held[PoolName.KV], *halves, strict=True):
        quarter = len(page) // 4  # K of both halves, then V of both
        assert page == b"".join(
            part[plane * quarter : (plane + 1) * quarter] for plane in (0, 1) for part in parts
        )


@pytest.mark.parametrize("v1", [0, 1])
def test_an_anchor_without_bytes(v1: int, file_config: dict[str, Any]) -> None:
    config = {**file_config, "interface_v1": v1}
    side = PoolPlan(name=PoolName.DEEPSEEK_V4_C4, kind="mla")
    plans = [PoolPlan(kind="logical"), side]
    with Engine(plans, config) as writer, Engine(plans, config) as reader:
        writer.fill(1)
        written = writer.write(TOKENS)
        read = reader.read(MORE)
        assert (written.pages, read.hits, read.pages) == (8, 8, 8)
        assert read.held[side.name] == written.held[side.name]


def test_detach_and_attach_under_a_running_controller(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], file_config) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        storage = engine.storage
        engine.controller.detach_storage_backend()
        assert storage.batch_exists(written.hashes) == 0
        assert storage.get_stats() is None
        engine.controller.attach_storage_backend(
            "dynamic", PAGE_TOKENS, "org/model", dict(file_config), list(engine.entries.values())
        )
        engine.wipe()
        assert engine.read(TOKENS).held[PoolName.KV] == written.held[PoolName.KV]


def test_answers_are_strict(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        written = engine.write(TOKENS)
        storage, indices = engine.storage, written.places[PoolName.KV]
        hashes = [*written.hashes[:3], "ab" * 32, *written.hashes[4:]]
        assert storage.batch_get_v1(hashes, indices) == [True] * 3 + [False] + [True] * 4
        assert storage.batch_get_v1([], indices[:0]) == []
        assert storage.batch_get_v1(hashes, indices[:-1]) == [False] * 8
        assert storage.batch_set_v1(["../etc"] * 8, indices) == [False] * 8
        many = written.hashes + [f"{n:064x}" for n in range(5000)]
        assert storage.batch_exists(many) == 8
        assert storage.batch_exists([]) == 0
        assert [storage.exists(many[0]), storage.exists(many[-1])] == [True, False]
        assert storage.get("ab" * 32, engine.host().get_dummy_flat_data_page()) is None
        unknown = type("Transfer", (), {"name": "indexer", "keys": hashes, "host_indices": indices})
        assert storage.batch_set_v2([unknown]) == {"indexer": [False] * 8}


def test_clear_removes_its_own_pages_only(file_config: dict[str, Any]) -> None:
    with (
        Engine([PoolPlan()], file_config) as one,
        Engine([PoolPlan()], file_config, model="other") as other,
    ):
        one.write(TOKENS)
        other.write(TOKENS)
        assert one.storage.clear() is True
        assert (one.read(TOKENS).hits, other.read(TOKENS).hits) == (0, 8)


def test_metrics_are_sglangs_own(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config, metrics=True) as engine:
        engine.write(TOKENS)
        engine.read(TOKENS)
        metrics = engine.storage.get_stats()
        assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([8], [8])
        assert all(rate > 0 for rate in metrics.backup_bandwidth + metrics.prefetch_bandwidth)
        assert engine.storage.get_stats().prefetch_pgs == []
