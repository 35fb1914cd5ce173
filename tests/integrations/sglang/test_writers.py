"""Every key space of an engine has a rank that writes it, for all kinds of pools and all topologies."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.sglang import _pool_table
from hicache_storage.integrations.sglang._launch import LaunchIdentity
from hicache_storage.integrations.sglang._pool_table import PoolTable
from hicache_storage.integrations.sglang._settings import AdapterSettings

if TYPE_CHECKING:
    from hicache_storage.integrations.sglang._identity import Identity
    from hicache_storage.keys import KeySpace

_MLA = {"kv_lora_rank": 512}
_MHA = {"head_num": 1}
# The pools of a model with MLA: its KV, index keys, compressed KV and the drafts of both kinds.
POOLS: dict[str, dict[str, int]] = {
    "kv": _MLA,
    "indexer": {},
    "deepseek_v4_c4": {},
    "draft": _MHA,
    "draft_mla": _MLA,
    "mamba": {},
}


class Config(SimpleNamespace):
    """SGLang's `HiCacheStorageConfig`, with its own choice of the writer."""

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == 0


class Pool(SimpleNamespace):
    """A `StoredPool` without memory."""

    buffers = ()

    @classmethod
    def of(cls, name: str, host: Any, identity: Identity) -> Pool:
        spaces = identity.spaces(name, host, 64, 1)
        return cls(
            name=name, host=host, spaces=spaces, is_replicated=identity.is_replicated(name, host)
        )


class Store(SimpleNamespace):
    lends_memory = False

    def open_space(self, space: KeySpace) -> None:
        pass


def table_of(config: Any, arguments: dict[str, Any]) -> tuple[PoolTable, Any]:
    """Register the pools of a rank, as SGLang does. Return them and the transport."""
    settings = AdapterSettings(platform="cuda-sm90", weights="w", draft_model="d")
    launch = LaunchIdentity(arguments, settings, version="0.5.23")
    transport: Any = SimpleNamespace(store=Store(), writes_replicated=True)
    table = PoolTable(config, launch, "", transport, str)
    fields = {"layout": "page_first", "dtype": "torch.bfloat16", "layer_num": 2, "start_layer": 0}
    for name, kind in POOLS.items():
        host: Any = SimpleNamespace(page_size=64, **fields, **kind)
        table.register(name, host)
    return table, transport


def place(**fields: int | bool) -> dict[str, Any]:
    alone = {
        "tp_rank": 0,
        "tp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
    }
    return {**alone, "model_name": "org/model", "is_mla_model": True, **fields}


@pytest.mark.parametrize("dp_attention", [False, True], ids=["", "dp_attention"])
@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
def test_each_key_space_has_one_writer(
    *, mla: bool, dp_attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool_table, "StoredPool", Pool.of)
    for tp, cp, pp in product((1, 2, 4, 8), (1, 2, 3), (1, 2)):
        readers: set[KeySpace] = set()
        writers: list[KeySpace] = []
        for stage, context, rank in product(range(pp), range(cp), range(tp)):
            # SGLang counts context-parallel ranks one after the other (parallel_state.py), and only with
            # data-parallel attention each of them for itself.
            config = Config(
                **place(
                    tp_rank=rank if dp_attention else context * tp + rank,
                    tp_size=tp if dp_attention else cp * tp,
                    attn_cp_rank=context,
                    attn_cp_size=cp,
                    pp_rank=stage,
                    pp_size=pp,
                    is_mla_model=mla,
                )
            )
            table, transport = table_of(config, {"enable_dp_attention": dp_attention})
            for pool in table.all():
                readers.update(pool.spaces)
                # `should_backup` of SGLang, and then what the transport leaves to another rank
                backed_up = config.is_storage_writer or pool.name == "mamba"
                if backed_up and (transport.writes_replicated or not pool.is_replicated):
                    writers += pool.spaces

        assert len(writers) == len(readers), (tp, cp, pp)
        assert set(writers) == readers, (tp, cp, pp)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_release_that_writes_on_one_rank_only_is_refused_with_context_parallelism(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool_table, "StoredPool", Pool.of)
    config = SimpleNamespace(**place(tp_rank=rank, tp_size=2, attn_cp_rank=rank, attn_cp_size=2))

    with pytest.raises(ConfigError, match=r"context parallelism.*use SGLang 0\.5\.23"):
        table_of(config, {})
