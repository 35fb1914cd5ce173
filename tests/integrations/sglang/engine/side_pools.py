"""Host pools that are not attention KV: states of linear attention, index keys of sparse attention."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from typing import Any

import pytest
from sglang_engine import (
    Engine,
    MLATokenToKVPoolHost,
    PoolName,
    PoolPlan,
    PoolTransfer,
    engine_world,
    hashes_of,
    named,
)

torch: Any = importlib.import_module("torch")
HASHES = hashes_of(range(8))


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


def store_and_load(engine: Engine, pool: Any, name: Any, places: Any, others: Any) -> None:
    """Store two pages from some slots, and load them into others, byte for byte."""
    storage, step = engine.storage, len(places) // 2
    storage.register_mem_host_pool_v2(pool, name)
    held = [pool.get_data_page(start).clone() for start in places.tolist()[::step]]
    out = PoolTransfer(name, host_indices=places, keys=HASHES)
    assert storage.batch_set_v2([out]) == {name: [True, True]}
    back = PoolTransfer(name, host_indices=others, keys=HASHES)
    assert storage.batch_get_v2([back]) == {name: [True, True]}
    for start, page in zip(others.tolist()[::step], held, strict=True):
        assert torch.equal(page, pool.get_data_page(start))


@pytest.mark.parametrize("side_states", [0, 1])
def test_states_of_linear_attention(side_states: int, file_config: dict[str, Any]) -> None:
    info = named("mem_cache.device_pool_info", "MambaStateBufferInfo")(
        temporal=torch.zeros(3, 8, 4, 6),
        conv=(torch.zeros(3, 8, 5, dtype=torch.bfloat16),) * 2,
        extra_checkpoint_buffers=(torch.zeros(8, 7),) * side_states,
    )
    pool = named("mem_cache.pool_host.mamba", "MambaPoolHost")(
        info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first"
    )
    for buffer in pool.kv_buffer:
        buffer.view(torch.uint8).random_(0, 256)
    with Engine([PoolPlan()], file_config) as engine:
        store_and_load(engine, pool, PoolName.MAMBA, torch.tensor([3, 5]), torch.tensor([7, 1]))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_index_keys_of_sparse_attention(layout: str, file_config: dict[str, Any]) -> None:
    tokens = 64
    device = named("mem_cache.memory_pool", "DSATokenToKVPool")(
        size=4 * tokens,
        page_size=tokens,
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        index_head_dim=128,
        kv_cache_dim=576,
        start_layer=0,
        end_layer=3,
    )
    if not hasattr(device, "get_device_pool_infos"):
        pytest.skip("0.5.22 makes these pools otherwise")
    anchor = MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        tokens,
        layout,
        device_capacity_tokens=4 * tokens,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
        override_kv_cache_dim=576,
    )
    declared = named("mem_cache.pool_host.dsa", "make_dsa_indexer_pool_decl")(device)
    pool = named("mem_cache.pool_host.dsa", "DSAIndexerPoolHost")(
        decl=declared, anchor_host=anchor, pin_memory=False
    )
    pool.index_k_with_scale_buffer.random_(0, 256)
    pages = torch.arange(5 * tokens).view(5, tokens)
    with Engine([PoolPlan()], file_config) as engine:
        store_and_load(
            engine, pool, PoolName.INDEXER, pages[[1, 3]].flatten(), pages[[0, 2]].flatten()
        )
