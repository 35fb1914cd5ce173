"""The store of an adapter, without LMCache."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from pages import hash_of, space
from spans import Spans

from hicache_storage.integrations.lmcache._attachment import Session
from hicache_storage.integrations.lmcache._settings import AdapterSettings

if TYPE_CHECKING:
    from collections.abc import Generator

    import pytest

SPACE = space()


@contextmanager
def session(**params: Any) -> Generator[Session]:
    """Yield a session over a storage in memory. LMCache's own types are not needed without a serde."""
    settings = AdapterSettings.of({"backend": "memory", "revision": "", **params})
    opened = Session(settings, cast("Any", None), None, lambda _session, _kind: None)
    try:
        opened.store.open_space(SPACE)
        yield opened
    finally:
        opened.close()


def test_tracing_makes_spans_of_the_adapters_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with session(tracing=True) as opened:
        opened.store.present(SPACE, [hash_of(1)])

    attributes = spans.only("hicache.present").attributes or {}
    assert ("lmcache", "memory") == (attributes["hicache.engine"], attributes["hicache.backend"])


def test_there_are_no_spans_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with session() as opened:
        opened.store.present(SPACE, [hash_of(1)])

    assert [] == spans.named("hicache.present")
