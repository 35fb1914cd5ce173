"""KV events of a store below SGLang, decoded by SGLang's own structures."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
from event_streams import past
from servers import free_port, wait_until
from sglang_engine import TOKENS
from sglang_radix import Server, server_world

kv_events: Any = importlib.import_module("sglang.srt.disaggregation.kv_events")
utils: Any = importlib.import_module("sglang.srt.mem_cache.utils")
decode = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode


def test_stored_and_cleared_pages_are_events_with_sglangs_own_hashes(
    file_config: dict[str, Any],
) -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    events = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "bind": True,
        "replay_endpoint": replay,
        "medium": "EXTERNAL",
    }
    with server_world({**file_config, "adapter": {"events": events}}), Server() as server:
        server.compute(TOKENS)
        expected = [utils.hash_str_to_int64(page) for page in server._hashes(TOKENS)]
        assert server.storage.clear()

        def published() -> list[Any]:
            return [event for _, batch in past(replay, decode=decode) for event in batch.events]

        wait_until(lambda: kv_events.AllBlocksCleared() in published())
        *stored, cleared = published()

    assert expected == [block for event in stored for block in event.block_hashes]
    assert {(kv_events.BlockStored, "EXTERNAL", None)} == {
        (type(event), event.medium, event.parent_block_hash) for event in stored
    }
    assert kv_events.AllBlocksCleared() == cleared


def test_only_rank_0_publishes(file_config: dict[str, Any]) -> None:
    adapter: Any = importlib.import_module("hicache_storage.integrations.sglang._adapter")
    settings: Any = importlib.import_module("hicache_storage.integrations.sglang._settings")
    storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    chosen = settings.AdapterSettings(events={"endpoint": "tcp://*:5557"})
    parts = {"tp_size": 2, "pp_size": 2, "pp_rank": 0, "attn_cp_rank": 0, "attn_cp_size": 2}
    rest = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}

    def source(**ranks: int) -> Any:
        fields = {"tp_rank": 0, "model_name": "m", **parts, **rest, **ranks}
        return adapter._event_source(storage.HiCacheStorageConfig(**fields), chosen)

    assert source() is not None
    assert source(dp_rank=2).rank == 2
    assert None is source(tp_rank=1) is source(pp_rank=1) is source(attn_cp_rank=1)
