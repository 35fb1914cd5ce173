"""The config of `fsspec`, and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fsspec_stores import SECRET, SPACE, A, Hooks, open_store, page_file, raising
from hicache_backends.fsspec import FsspecSettings, FsspecStorage
from pages import page

from hicache_storage import open_storage
from hicache_storage.errors import BackendNotInstalled, ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from pathlib import Path


class TestConfig:
    def test_it_is_opened_by_its_name(self, tmp_path: Path) -> None:
        with open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}) as store:
            assert isinstance(store, FsspecStorage)

    def test_a_url_is_required(self) -> None:
        with pytest.raises(ConfigError, match="url: this field is required"):
            FsspecStorage.from_config({})

    def test_a_chain_of_filesystems_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"url: must name one filesystem, without '::'"):
            FsspecStorage.from_config({"url": "simplecache::s3://bucket/kv"})

    def test_an_unknown_filesystem_is_named(self) -> None:
        with pytest.raises(ConfigError, match="url: no filesystem is known as 'nosuch'"):
            FsspecStorage.from_config({"url": "nosuch://kv"})

    def test_a_filesystem_whose_library_is_missing_says_what_to_install(self) -> None:
        with pytest.raises(BackendNotInstalled, match=r"gs:// needs more than fsspec.*gcsfs"):
            FsspecStorage.from_config({"url": "gs://bucket/kv"})

    def test_options_that_the_filesystem_does_not_take_are_a_config_error(
        self, scripted: Hooks
    ) -> None:
        with pytest.raises(ConfigError, match=r"storage_options: scripted://kv .*\(TypeError\)"):
            FsspecStorage.from_config({"url": "scripted://kv", "storage_options": {"tsate": 1}})

    def test_a_path_without_a_protocol_is_local(self, tmp_path: Path) -> None:
        with open_store(f"{tmp_path}/kv") as store:
            store.batch_set(SPACE, [A], [page()])

        assert page_file(tmp_path, A).is_file()

    def test_secrets_are_in_no_repr(self) -> None:
        settings = FsspecSettings.parse(
            "fsspec", {"url": f"sftp://me:{SECRET}@host/kv", "storage_options": {"key": SECRET}}
        )

        assert SECRET not in repr(settings)
        assert SECRET not in str(settings)

    def test_secrets_are_in_no_message(self, scripted: Hooks) -> None:
        scripted.before_write = raising(OSError(f"401 with {SECRET}"))
        with pytest.raises(StorageUnavailable) as caught:
            open_store(f"scripted://me:{SECRET}@host/kv?key={SECRET}")

        assert "scripted://host/kv" in str(caught.value)
        assert SECRET not in str(caught.value)
