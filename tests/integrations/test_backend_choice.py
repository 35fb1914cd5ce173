"""Which backend an adapter opens, and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.memory import MemoryStorage
from hicache_backends.redis import RedisStorage

from hicache_storage.errors import ConfigError, UnknownBackend
from hicache_storage.integrations._backend_choice import (
    BackendChoice,
    backend_fields,
    close_store,
    closed_on_failure,
    register_memory,
)
from hicache_storage.page_store import PageStore

URL = {"url": "redis://127.0.0.1:1/0"}


class Closable(MemoryStorage):
    """A storage that counts how often it is closed."""

    closes = 0

    def close(self) -> None:
        self.closes += 1
        super().close()


class Unclosable(MemoryStorage):
    """A storage that raises when it is closed or when it registers memory."""

    def close(self) -> None:
        raise OSError("no")

    def register_buffer(self, buffer: Any) -> None:
        raise OSError("no")


class Bounded(MemoryStorage):
    """A storage that declares that its calls end in time."""

    capabilities = replace(MemoryStorage.capabilities, bounded=True)


# --- fields ---------------------------------------------------------------------------------------


def test_a_composition_is_opened_with_half_of_the_time_for_each_of_its_stores() -> None:
    tiers = [{"name": name, "backend": "memory"} for name in ("ram", "far")]
    choice = BackendChoice.of("tiered", {"tiers": tiers}, 3.0)

    assert choice.timeout_s == 1.5
    with choice.open() as storage:
        assert ["ram", "far"] == list(storage.parts())


def test_fields_are_a_copy() -> None:
    assert backend_fields(URL, "x") == URL
    assert backend_fields(URL, "x") is not URL


def test_fields_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')

    assert {"a": 1} == backend_fields(f"@{tmp_path}/c.json", "x")


def test_text_that_names_no_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tier: config: must be an object, or '@'"):
        backend_fields("redis://x", "tier: config")


# --- the choice -----------------------------------------------------------------------------------


def test_a_bounded_backend_gets_half_of_the_time_of_a_load() -> None:
    choice = BackendChoice.of("redis", URL, 3.0)

    assert (RedisStorage, {**URL, "timeout_s": 1.5}, 1.5) == choice


@pytest.mark.parametrize("given", ["0.25", "250ms", 0.25])
def test_the_time_limit_of_the_user_stays(given: object) -> None:
    assert 0.25 == BackendChoice.of("redis", {**URL, "timeout_s": given}, 3.0).timeout_s


def test_any_other_backend_gets_no_time_limit() -> None:
    assert (MemoryStorage, {}, None) == BackendChoice.of("memory", {}, 3.0)


def test_a_time_limit_that_is_none_is_left_to_the_backend() -> None:
    choice = BackendChoice.of("redis", {**URL, "timeout_s": "soon"}, 3.0)

    assert choice.timeout_s is None
    assert "soon" == choice.fields["timeout_s"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UnknownBackend):
        BackendChoice.of("rediss", {}, 3.0)


# --- open and close -------------------------------------------------------------------------------


def test_a_storage_is_closed_if_its_user_fails() -> None:
    storage = Closable.from_config({})
    with pytest.raises(RuntimeError, match="no thread"), closed_on_failure(PageStore(storage)):
        raise RuntimeError("no thread")

    assert 1 == storage.closes


def test_a_storage_stays_open_for_its_user() -> None:
    storage = Closable.from_config({})
    with closed_on_failure(PageStore(storage)):
        pass

    assert 0 == storage.closes


def test_a_store_is_closed_with_its_storage() -> None:
    storage = Closable.from_config({})
    close_store(PageStore(storage))

    assert 1 == storage.closes


def test_a_storage_that_cannot_close_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    close_store(PageStore(Unclosable.from_config({})))

    assert "a part of the adapter could not be closed" in caplog.text


def test_memory_that_cannot_be_registered_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    store = PageStore(Unclosable.from_config({}))

    assert not register_memory(store, memoryview(bytearray(4096)))
    assert "will copy each page once more" in caplog.text
    store.close()
