"""The storage of a tier, tested without vLLM."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from pages import hash_of, space
from spans import Spans

from hicache_storage.integrations.vllm._connection import StoreConnection
from hicache_storage.integrations.vllm._settings import tier_settings
from hicache_storage.page_store import PageStore

SPACE = space()


@contextmanager
def connected(**fields: Any) -> Generator[PageStore]:
    """Yield the page store of a tier over a storage in memory."""
    settings = tier_settings({"backend": "memory", **fields})
    connection = StoreConnection(settings, memoryview(bytearray(4096)), SPACE)
    try:
        assert connection.store is not None
        connection.store.open_space(SPACE)
        yield connection.store
    finally:
        assert connection.close(20)


def test_tracing_makes_spans_of_the_tiers_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with connected(tracing=True) as store:
        store.present(SPACE, [hash_of(1)])

    attributes = spans.only("hicache.present").attributes or {}
    assert ("vllm", "memory") == (attributes["hicache.engine"], attributes["hicache.backend"])


def test_there_are_no_spans_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with connected() as store:
        store.present(SPACE, [hash_of(1)])

    assert [] == spans.named("hicache.present")
