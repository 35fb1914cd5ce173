"""SGLang's radix tree with our linker, which takes the place of HiCache."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if metadata.version("sglang") < "0.5.23":
    pytest.skip("this SGLang has no linker", allow_module_level=True)

from servers import ROOT, RedisServer, wait_until
from serving.stores import Store
from sglang_engine import DRAFT, PAGE_TOKENS, TOKENS, CacheRequestHandle, named
from sglang_radix import ComponentType, LinkedServer, Server, linker_world, server_world

from hicache_storage.errors import ConfigError
from hicache_storage.integrations import sglang as integration
from hicache_storage.integrations.sglang import _interface

EvictParams = named("mem_cache.base_prefix_cache", "EvictParams")
PAGES = len(TOKENS) // PAGE_TOKENS


@pytest.fixture
def redis(tmp_path: Path) -> Generator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server
        server.resume()


def config_of(redis: RedisServer, file_config: dict[str, Any]) -> dict[str, Any]:
    config = {**file_config, "backend_name": "redis", "url": redis.url}
    del config["path"]
    return config


def store_of(file_config: dict[str, Any]) -> Store:
    return Store("file", {"path": file_config["path"]})


# --- pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_prefix_comes_back_into_a_cold_server(kind: str, config: dict[str, Any]) -> None:
    with linker_world(config), LinkedServer(kind) as warm, LinkedServer(kind) as cold:
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_a_layer_first_server(file_config: dict[str, Any]) -> None:
    with (
        linker_world(file_config, layout="layer_first"),
        LinkedServer() as warm,
        LinkedServer() as cold,
    ):
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_target_and_draft_come_back_together(file_config: dict[str, Any]) -> None:
    with (
        linker_world(file_config, speculative_draft_model_path="org/draft"),
        LinkedServer(draft=DRAFT) as warm,
        LinkedServer(draft=DRAFT) as cold,
    ):
        computed = warm.compute(TOKENS)
        assert cold.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_a_target_without_its_draft_is_a_miss(file_config: dict[str, Any]) -> None:
    with linker_world(file_config, speculative_draft_model_path="org/draft"):
        with LinkedServer(draft=DRAFT) as warm:
            warm.compute(TOKENS)
        with store_of(file_config).open() as storage:
            drafts = [space for space in storage.spaces() if space.pool == "draft"]
            assert sum(storage.remove_space(space.id) for space in drafts) == PAGES
        with LinkedServer(draft=DRAFT) as cold:
            assert cold.load_prefix(TOKENS)[0] == 0


def test_a_linker_and_hicache_share_pages(file_config: dict[str, Any]) -> None:
    with server_world(file_config), Server() as hicache:
        computed = hicache.compute(TOKENS)
    with linker_world(file_config), LinkedServer() as linked:
        assert linked.load_prefix(TOKENS) == (len(TOKENS), computed)
        more = [7, *TOKENS[1:]]
        computed = linked.compute(more)
    with server_world(file_config), Server() as hicache:
        assert hicache.load_prefix(more) == (len(more), computed)


def test_two_requests_are_loaded_in_one_batch(file_config: dict[str, Any]) -> None:
    with linker_world(file_config), LinkedServer() as warm, LinkedServer() as cold:
        prompts = [[first, *TOKENS[1:]] for first in (1, 2)]
        computed = [warm.compute(prompt) for prompt in prompts]
        requests = [cold.match(prompt, f"request {n}") for n, prompt in enumerate(prompts)]
        assert [cold.load(request) for request in requests] == [len(TOKENS)] * 2
        slots = [cold.cache.linker.private_load_indices[request.rid] for request in requests]
        cold.cache.ready_to_load_host_cache()
        assert not cold.cache.finish_external_linker_loads(requests)
        assert [cold._held(each) for each in slots] == computed


def test_what_was_loaded_is_not_written_again(file_config: dict[str, Any]) -> None:
    with linker_world(file_config), LinkedServer() as warm, LinkedServer() as cold:
        warm.compute(TOKENS)
        cold.load_prefix(TOKENS)
        cold.offload()
        counters = cold.storage.counters()
    assert counters["load_ok"] == PAGES
    assert not counters.get("save_ok")


# --- host memory ------------------------------------------------------------------------------------


def host_slots(server: LinkedServer) -> int:
    return int(server.linker._host.controller.mem_pool_host.available_size())


def test_every_slot_of_host_memory_becomes_free(file_config: dict[str, Any]) -> None:
    with linker_world(file_config), LinkedServer() as warm, LinkedServer() as cold:
        free = host_slots(cold)
        warm.compute(TOKENS)
        assert host_slots(warm) == free
        cold.load(cold.match(TOKENS))
        assert host_slots(cold) == free - len(TOKENS)
        cold.cache.release_aborted_request(CacheRequestHandle("request", 0))
        assert host_slots(cold) == free
        cold.load_prefix(TOKENS)
        cold.offload()
        assert host_slots(cold) == free


def test_without_room_nothing_is_loaded_or_stored(file_config: dict[str, Any]) -> None:
    with linker_world(file_config), LinkedServer() as warm:
        warm.compute(TOKENS)
        small = PAGE_TOKENS / (64 * PAGE_TOKENS)
        with linker_world(file_config, hicache_ratio=small), LinkedServer() as cold:
            assert host_slots(cold) < len(TOKENS)
            assert cold.load_prefix(TOKENS)[0] == 0
            cold.compute([7, *TOKENS[1:]])
            assert cold.storage.batch_exists(cold._hashes([7, *TOKENS[1:]])) == 0


# --- a store that fails -----------------------------------------------------------------------------


def test_a_damaged_page_is_computed_and_stored_again(file_config: dict[str, Any]) -> None:
    with linker_world(file_config):
        with LinkedServer() as warm:
            warm.compute(TOKENS)
            assert store_of(file_config).damage() == PAGES
        with LinkedServer() as cold:
            free = cold.allocator.available_size()
            request = cold.match(TOKENS)
            assert request.matched.host_hit_length == len(TOKENS)
            assert cold.load(request) == 0
            assert cold.allocator.available_size() == free
            assert cold.cache.ready_to_load_host_cache() == -1
            computed = cold.compute(TOKENS)
        with LinkedServer() as third:
            assert third.load_prefix(TOKENS) == (len(TOKENS), computed)


def test_a_page_that_is_damaged_after_it_was_loaded_is_stored_again(
    file_config: dict[str, Any],
) -> None:
    with linker_world(file_config), LinkedServer() as warm, LinkedServer() as cold:
        warm.compute(TOKENS)
        cold.load_prefix(TOKENS)
        cold.offload()
        cold.cache.evict(EvictParams(num_tokens=len(TOKENS)))
        assert store_of(file_config).damage() == PAGES
        assert cold.load(cold.match(TOKENS)) == 0
        cold.compute(TOKENS)
        assert cold.storage.batch_exists(cold._hashes(TOKENS)) == PAGES


def test_a_store_that_dies_is_a_miss(tmp_path: Path, file_config: dict[str, Any]) -> None:
    with (
        RedisServer(tmp_path / "redis") as redis,
        linker_world(config_of(redis, file_config)),
        LinkedServer() as warm,
        LinkedServer() as cold,
    ):
        warm.compute(TOKENS)
        request = cold.match(TOKENS)
        redis.stop()
        assert cold.load(request) == 0
        assert cold.match(TOKENS).matched.host_hit_length == 0
        warm.compute([7, *TOKENS[1:]])


def test_the_scheduler_waits_for_a_store_that_hangs_only_briefly(
    redis: RedisServer, file_config: dict[str, Any]
) -> None:
    with (
        linker_world(config_of(redis, file_config), timeout_s=None),
        LinkedServer() as warm,
        LinkedServer() as cold,
    ):
        computed = warm.compute(TOKENS)
        request = cold.match(TOKENS)
        redis.pause()
        began_s = time.monotonic()
        assert cold.load(request) == 0
        assert time.monotonic() - began_s < 3
        began_s = time.monotonic()
        for number in range(20):
            request = cold.match([number, *TOKENS[1:]], f"request {number}")
            assert not request.matched.host_hit_length
        assert time.monotonic() - began_s < 3
        redis.resume()

        def is_back() -> bool:
            time.sleep(0.1)
            return cold.load_prefix(TOKENS) == (len(TOKENS), computed)

        wait_until(is_back)


def test_a_flush_ends_while_a_store_hangs(redis: RedisServer, file_config: dict[str, Any]) -> None:
    with linker_world(config_of(redis, file_config), timeout_s=None), LinkedServer() as server:
        redis.pause()
        for first in range(4):
            server._insert_random([first, *TOKENS[1:]])
        began_s = time.monotonic()
        server.cache.reset()
        assert time.monotonic() - began_s < 5
        redis.resume()
        assert not server.cache.linker.pending_offloads
        assert not server.linker.num_completed_offloads()


@pytest.mark.timeout(400)
def test_no_rank_loads_what_another_rank_lacks(tmp_path: Path) -> None:
    program = ROOT / "tests/support/sglang_linked_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    seen = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    same = {
        "is_loaded": True,
        "found": len(TOKENS),
        "loaded_in_spite_of_damage": 0,
        "is_free_again": True,
    }
    assert seen == [{**same, "corrupt": corrupt} for corrupt in (0, PAGES)]


# --- the start --------------------------------------------------------------------------------------


def test_the_linkers_deadline_is_short_unless_it_is_set(file_config: dict[str, Any]) -> None:
    with linker_world(file_config, timeout_s=None), LinkedServer() as server:
        assert server.storage._store.settings.timeout_s == 1
    with linker_world({**file_config, "adapter": {"timeout_s": 3}}), LinkedServer() as server:
        assert server.storage._store.settings.timeout_s == 3


def test_a_wrong_field_ends_the_launch(file_config: dict[str, Any]) -> None:
    with (
        linker_world({**file_config, "adapter": {"tenent": "a"}}),
        pytest.raises(ConfigError, match="did you mean 'tenant'"),
    ):
        LinkedServer()


def test_a_model_with_a_sliding_window_is_refused(file_config: dict[str, Any]) -> None:
    with linker_world(file_config), pytest.raises(ConfigError, match="not SWA: use --enable-hier"):
        LinkedServer("window")


def test_pipeline_stages_are_refused() -> None:
    from hicache_storage.integrations.sglang._host_stack import HostStack

    with pytest.raises(ConfigError, match="not several stages"):
        HostStack(SimpleNamespace(pp_size=2), {ComponentType.FULL}, None)


# --- the interface ----------------------------------------------------------------------------------


def modules() -> list[Any]:
    return [importlib.import_module(name) for name in integration._LINKER]


def test_this_sglang_is_known() -> None:
    linker, controller, assembler = modules()
    _interface.check_linker_interface(linker, controller, assembler, "0.5.23")


def test_a_difference_is_named() -> None:
    _, controller, assembler = modules()

    def select(kvcache: object) -> None: ...

    changed = SimpleNamespace(**{**vars(assembler), "_select_strategy": select})
    with pytest.raises(ImportError, match=r"UnifiedCacheLinker is missing.*_select_strategy takes"):
        _interface.check_linker_interface(SimpleNamespace(), controller, changed, "9.9.9")


def test_the_class_satisfies_sglangs_factory() -> None:
    base = modules()[0].UnifiedCacheLinker
    assert issubclass(integration.SGLangCacheLinker, base)
    assert not getattr(integration.SGLangCacheLinker, "__abstractmethods__", None)
    assert integration.SGLangCacheLinker is integration.SGLangCacheLinker
