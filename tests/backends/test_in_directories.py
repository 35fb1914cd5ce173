"""The behavior that the backends with a directory of files have in common."""

from __future__ import annotations

import random
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.hf3fs import Hf3fsStorage
from pages import blank, hash_of, page, space
from processes import descriptors

from hicache_storage import ConfigError, HiCacheStorage, Page, open_storage

SPACE = space()
HASHES = [hash_of(number) for number in range(8)]


@dataclass(frozen=True)
class Kind:
    """A backend, and one way to configure it."""

    name: str
    backend: str
    storage_class: type[HiCacheStorage]
    config: dict[str, Any]

    def open(self, root: Path, **config: Any) -> HiCacheStorage:
        return open_storage(self.backend, {"path": str(root), **self.config, **config})


KINDS = [
    Kind("file", "file", FileStorage, {}),
    Kind("hf3fs-direct", "hf3fs", Hf3fsStorage, {"direct": True}),
    Kind("hf3fs-buffered", "hf3fs", Hf3fsStorage, {"direct": False}),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def storage(kind: Kind, root: Path) -> Iterator[HiCacheStorage]:
    with kind.open(root) as storage:
        storage.open_space(SPACE)
        yield storage


def stored(storage: HiCacheStorage, numbers: range) -> None:
    hashes = [hash_of(number) for number in numbers]
    assert [True] * len(hashes) == storage.batch_set(SPACE, hashes, [page(seed=n) for n in numbers])


def got(storage: HiCacheStorage, page_hash: str) -> bytes | None:
    target = blank()
    return target.tobytes() if storage.batch_get(SPACE, [page_hash], [target]) == [True] else None


class TestPages:
    @pytest.mark.parametrize("segments", [1, 2, 3, 512, 1024, 1500])
    def test_any_segmentation_is_read_back_in_any_other(
        self, storage: HiCacheStorage, segments: int
    ) -> None:
        pieces = [bytearray(random.Random(n).randbytes(n % 7 + 1)) for n in range(segments)]
        whole = Page(*pieces)
        key_space = space(page_nbytes=whole.nbytes)
        target = Page(*[bytearray(1) for _ in range(whole.nbytes)])

        assert [True] == storage.batch_set(key_space, HASHES[:1], [whole])
        assert [True] == storage.batch_get(key_space, HASHES[:1], [target])
        assert whole.tobytes() == target.tobytes()

    @pytest.mark.parametrize("nbytes", [1, 63, 4095, 4097, (1 << 20) + 1, 64 << 20])
    def test_any_size(self, storage: HiCacheStorage, nbytes: int) -> None:
        key_space = space(page_nbytes=nbytes)
        source, target = page(nbytes), blank(nbytes)

        assert [True] == storage.batch_set(key_space, HASHES[:1], [source])
        assert [True] == storage.batch_get(key_space, HASHES[:1], [target])
        assert source.tobytes() == target.tobytes()

    def test_no_joined_copy_is_made(self, storage: HiCacheStorage) -> None:
        """A batch allocates far less memory than one page."""
        nbytes = 8 << 20
        key_space = space(page_nbytes=nbytes)
        source = Page(*[memoryview(bytearray(nbytes // 64)) for _ in range(64)])
        target = Page(*[memoryview(bytearray(nbytes // 64)) for _ in range(64)])
        storage.open_space(key_space)
        tracemalloc.start()
        try:
            assert [True] == storage.batch_set(key_space, HASHES[:1], [source])
            assert [True] == storage.batch_get(key_space, HASHES[:1], [target])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak < nbytes // 16


class TestLifecycle:
    def test_a_manifest_in_the_wrong_place_is_no_key_space(
        self, storage: HiCacheStorage, root: Path
    ) -> None:
        strange = root / "spaces" / ("0" * 32)
        strange.mkdir()
        shutil.copy(root / "spaces" / SPACE.id / "manifest.json", strange)

        assert [SPACE] == list(storage.spaces())

    def test_opening_fifty_times_leaves_nothing_behind(self, kind: Kind, root: Path) -> None:
        def use() -> None:
            with kind.open(root, capacity_nbytes="1MiB") as storage:
                stored(storage, range(4))
                assert page().tobytes() == got(storage, HASHES[0])

        use()
        fds, threads = descriptors(), set(threading.enumerate())
        for _ in range(50):
            use()

        assert fds == descriptors()
        assert not set(threading.enumerate()) - threads
        assert [] == list((root / "writers").iterdir())


class TestSettings:
    def test_the_registry_opens_it(self, kind: Kind, tmp_path: Path) -> None:
        with kind.open(tmp_path / "a" / "b") as storage:
            assert isinstance(storage, kind.storage_class)

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({}, "path"),
            ({"path": ""}, "path"),
            ({"path": "\0"}, "path"),
            ({"path": "ROOT", "capacity_nbytes": 0}, "capacity_nbytes"),
            ({"path": "ROOT", "capacity": 1}, "capacity"),
            ({"path": "ROOT", "touch_interval_s": -1}, "touch_interval_s"),
            ({"path": "ROOT", "timeout_s": 0}, "timeout_s"),
        ],
    )
    def test_a_wrong_field_is_named(
        self, kind: Kind, tmp_path: Path, config: dict[str, Any], named: str
    ) -> None:
        config = {key: str(tmp_path) if value == "ROOT" else value for key, value in config.items()}
        with pytest.raises(ConfigError, match=named):
            kind.storage_class.from_config(config)

    def test_a_path_that_is_a_file_is_refused(self, kind: Kind, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="path"):
            kind.open(tmp_path / "file")

    def test_the_home_directory_is_expanded(
        self, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        with kind.open(Path("~/cache")):
            assert (tmp_path / "cache" / "spaces").is_dir()


def test_a_directory_of_its_own_gives_no_warning(
    kind: Kind, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with kind.open(root, capacity_nbytes="100MiB") as storage:
            storage.open_space(SPACE)
            stored(storage, range(4))

    assert caplog.messages == []


def test_files_of_other_programs_in_the_directory_are_named(
    kind: Kind, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root.mkdir(exist_ok=True)
    (root / "model.safetensors").touch()

    kind.open(root).close()

    assert "holds files of other programs ('model.safetensors')" in caplog.text


def test_a_capacity_beyond_the_file_system_is_a_warning(
    kind: Kind, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind.open(root, capacity_nbytes="4000PiB").close()

    assert f"capacity_nbytes is 3.91 EiB, but the file system of {root} has only" in caplog.text
