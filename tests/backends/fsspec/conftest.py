"""Fixtures of the tests of `fsspec`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec_stores import Hooks, ObjectStore, filesystem_class_over, open_store, register_scripted
from hicache_backends.fsspec import FsspecStorage


@pytest.fixture
def scripted() -> Hooks:
    """Return the hooks of `scripted://`, an empty filesystem of no known kind."""
    return register_scripted()


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return the object store under `gs://`."""
    store = ObjectStore()
    registry: Any = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registry._registry, "gs", filesystem_class_over(store))
    return store


@pytest.fixture
def local(tmp_path: Path) -> Iterator[FsspecStorage]:
    with open_store(f"file://{tmp_path}/kv") as store:
        yield store
