"""Replays over `hf3fs`: target and draft pages, from two processes at once."""

from __future__ import annotations

from pathlib import Path

from replays import assert_shared
from servers import RedisServer


def _has_pages(store: Path) -> bool:
    return any(slots.stat().st_blocks for slots in store.rglob("slots-*"))


def test_two_processes_share_pages_by_an_index_in_sqlite(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert_shared("hf3fs", {"path": str(store)}, tmp_path, lambda: _has_pages(store))


def test_two_processes_share_pages_by_an_index_in_redis(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with RedisServer(tmp_path / "redis") as server:
        config = {"path": str(store), "index": server.url}
        assert_shared("hf3fs", config, tmp_path, lambda: _has_pages(store))
