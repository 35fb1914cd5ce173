"""The SGLang adapter, tested without SGLang."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hicache_backends.memory import MemoryStorage
from pages import hash_of, space
from spans import Spans

from hicache_storage.integrations._metrics import AdapterMetrics
from hicache_storage.integrations.sglang import _adapter
from hicache_storage.integrations.sglang._adapter import Adapter
from hicache_storage.integrations.sglang._engine import EngineTypes
from hicache_storage.page_store import PageStore

SPACE = space()


def _unused(*_: object, **__: object) -> None:
    """Stand in for a class of SGLang that these tests do not need."""


class LoneAdapter(Adapter):
    """The adapter without its base class from SGLang."""

    engine = EngineTypes(
        pool_transfer_result=_unused,
        storage_metrics=_unused,
        launch_arguments=dict,
        launch_defaults=dict,
        argument_overrides=list,
        variables=dict,
        version=str,
        fp8_type=str,
        index_key_order=str,
        replica=int,
    )


@contextmanager
def attached(**adapter: Any) -> Generator[PageStore]:
    """Yield the page store of an adapter over a storage in memory."""
    config = SimpleNamespace(
        extra_config={"backend_name": "memory", "adapter": adapter},
        enable_storage_metrics=False,
        is_mla_model=False,
        tp_rank=3,
        tp_size=4,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
    )
    opened = LoneAdapter(cast("Any", config))
    try:
        opened._store.open_space(SPACE)
        yield opened._store
    finally:
        opened.close()


def test_tracing_makes_spans_of_the_adapters_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with attached(tracing=True) as store:
        store.present(SPACE, [hash_of(1)])

    attributes = spans.only("hicache.present").attributes or {}
    assert ("sglang", "memory", 3) == tuple(
        attributes[f"hicache.{name}"] for name in ("engine", "backend", "rank")
    )


def test_there_are_no_spans_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with attached() as store:
        store.present(SPACE, [hash_of(1)])

    assert [] == spans.named("hicache.present")


def test_a_start_that_fails_closes_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[MemoryStorage] = []

    def close(storage: MemoryStorage) -> None:
        closed.append(storage)

    monkeypatch.setattr(MemoryStorage, "close", close)
    monkeypatch.setattr(_adapter, "PoolTable", None)  # it cannot be called

    with pytest.raises(TypeError), attached():
        pass

    assert 1 == len(closed)


def test_a_part_that_cannot_be_closed_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[MemoryStorage] = []

    def close(storage: MemoryStorage) -> None:
        closed.append(storage)

    monkeypatch.setattr(MemoryStorage, "close", close)
    close_metrics = AdapterMetrics.close

    def close_and_fail(metrics: AdapterMetrics) -> None:
        close_metrics(metrics)  # or the process would count this adapter for ever
        raise RuntimeError("the metrics cannot be closed")

    with attached():
        monkeypatch.setattr(AdapterMetrics, "close", close_and_fail)
        monkeypatch.setattr(PageStore, "close", None)

    assert 1 == len(closed)
