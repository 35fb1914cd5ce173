"""The store of an adapter, without LMCache."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from event_streams import past
from pages import blank, hash_of, space
from servers import free_port, wait_until
from spans import Spans

from hicache_storage.errors import StorageClosed, StorageUnavailable
from hicache_storage.events.publisher import SENT
from hicache_storage.integrations.lmcache import _attachment
from hicache_storage.integrations.lmcache._attachment import Attachment, Session
from hicache_storage.integrations.lmcache._settings import AdapterSettings
from hicache_storage.keys import Shard
from hicache_storage.page_store.frame import FRAME_NBYTES, FramedPage
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Generator

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


def test_objects_of_the_first_rank_and_group_have_events() -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    events = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "bind": True,
        "replay_endpoint": replay,
    }
    first = replace(space(), pool="object_group_0", shard=Shard(layers=(0, 1), heads=(0, 1)))
    second = replace(first, shard=Shard(layers=(0, 1), heads=(1, 2)))
    windowed = replace(first, pool="object_group_1")

    with session(events=events) as opened, session(events=events):  # as at a new attach
        for number, stored in enumerate((second, windowed, first)):
            opened.store.open_space(stored)
            page = FramedPage(memoryview(bytearray(FRAME_NBYTES)), blank(stored.page_nbytes))
            opened.store.save([Transfer(stored, [hash_of(number)], [page])])
        wait_until(lambda: opened.store.stats()[SENT] == 1, 20)
        ((_, (_, published, _)),) = past(replay)

    assert [[int(hash_of(2)[-16:], 16)]] == [event["block_hashes"] for event in published]


def test_memory_that_cannot_be_unregistered_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> None:
        raise StorageUnavailable("the transfer engine is gone")

    with session() as opened:
        opened._buffer = memoryview(bytearray(1))
        monkeypatch.setattr(opened.store, "unregister_buffer", refuse)

    with pytest.raises(StorageClosed):
        opened.store.storage.stats()


def test_the_failure_of_an_attempt_that_was_given_up_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, gate, tries = threading.Event(), threading.Event(), list[int]()

    def fail(*_: Any) -> Session:
        tries.append(1)
        if len(tries) > 1:
            late.set()
            gate.wait(20)
        raise StorageUnavailable("the old store does not answer")

    monkeypatch.setattr(_attachment, "_REOPEN_S", 0.01)
    monkeypatch.setattr(_attachment, "Session", fail)
    attachment = Attachment(cast("Any", None), None, lambda _session, _kind: None)
    attachment.attach(AdapterSettings.of({"backend": "memory", "revision": ""}))
    assert late.wait(20)
    attachment.detach()
    gate.set()
    wait_until(lambda: "hicache-reopen" not in [one.name for one in threading.enumerate()], 20)

    assert not attachment.failure
