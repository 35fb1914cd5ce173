"""A read-only storage changes nothing in a cluster, and a removed key space loses its manifest."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import blank, hash_of, page, space
from servers import MooncakeMaster, load_mooncake

from hicache_storage import open_storage
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage, PageFault, UnreadableKind, UnreadableSpace

load_mooncake()

SPACE, LOST, DAMAGED, EMPTY = space(), space(model="lost"), space(model="dam"), space(model="empty")
SHORT, GONE, RIGHT = HASHES = [hash_of(number) for number in range(3)]
WRONG_SIZE = PageFault(SHORT, "wrong_size", "it is 5 bytes long instead of 4,096")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with (
        MooncakeMaster(tmp_path_factory.mktemp("master")) as started,
        open_storage("mooncake", config_of(started, "")),  # it lends the memory of all tests
    ):
        yield started


@pytest.fixture
def filled(master: MooncakeMaster, tmp_path: Path) -> Iterator[HiCacheStorage]:
    """Yield a store with a damaged page, damaged manifests and foreign objects."""
    with open_storage("mooncake", config_of(master, tmp_path.name)) as storage:
        for one in (SPACE, LOST, DAMAGED, EMPTY):
            storage.open_space(one)
        for one in (SPACE, LOST, DAMAGED):
            assert all(storage.batch_set(one, HASHES, [page(seed=1)] * len(HASHES)))
        layout, native = vars(storage)["_layout"], vars(storage)["_client"]._native
        manifests = [layout.manifest(one.id) for one in (LOST, DAMAGED)]
        for key in [layout.page(SPACE.id, SHORT), layout.page(SPACE.id, GONE), *manifests]:
            assert storage._remove({key}, storage._begin()) == set()  # type: ignore[attr-defined]
        native.put(layout.page(SPACE.id, SHORT), b"short")
        native.put(layout.manifest(DAMAGED.id), b'{"model": "dam')
        for key in strangers(tmp_path.name):
            native.put(key, b"x")
        yield storage


def config_of(master: MooncakeMaster, tag: str) -> dict[str, Any]:
    return master.config(timeout_s=5, extra_backend_tag=tag)


def strangers(tag: str) -> set[str]:
    return {f"{tag}/other", f"{tag}/{'0' * 32}/other", f"{tag}/{SPACE.id}/no-hash"}


def asked(master: MooncakeMaster, path: str) -> str:
    """Return the master's answer on its HTTP port."""
    url = f"http://127.0.0.1:{master.config()['master_metrics_port']}/{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def keys(master: MooncakeMaster, tag: str) -> set[str]:
    return {key for key in asked(master, "get_all_keys").split() if key.startswith(f"{tag}/")}


@pytest.mark.usefixtures("filled")
def test_looking_changes_no_object_and_lends_no_memory(
    master: MooncakeMaster, tmp_path: Path
) -> None:
    config = config_of(master, tmp_path.name) | {"global_segment_size": "32mb"}
    before = keys(master, tmp_path.name), asked(master, "get_all_segments")

    with open_storage("mooncake", config, read_only=True) as storage:
        storage.open_space(space(model="other"))
        assert {SPACE, EMPTY} == set(storage.spaces())
        assert [RIGHT] == [info.page_hash for info in storage.scan(SPACE)]
        assert [WRONG_SIZE] == list(storage.faults(SPACE))
        assert [WRONG_SIZE] == list(storage.faults(SPACE, HASHES))
        assert {
            UnreadableSpace(LOST.id, UnreadableKind.DAMAGED, "its manifest is lost"),
            UnreadableSpace(DAMAGED.id, UnreadableKind.DAMAGED, "its manifest is damaged"),
        } == set(storage.unreadable_spaces())
        storage.batch_exists(SPACE, HASHES)
        got = blank()
        assert [False, False, True] == storage.batch_get(SPACE, HASHES, [blank(), blank(), got])
        assert page(seed=1).tobytes() == got.tobytes()
        storage.page_times(SPACE, HASHES)
        storage.diagnose()
        storage.stats()
        assert before == (keys(master, tmp_path.name), asked(master, "get_all_segments"))

    assert before == (keys(master, tmp_path.name), asked(master, "get_all_segments"))


@pytest.mark.parametrize(("removed", "pages"), [(SPACE, 2), (LOST, 3), (DAMAGED, 3), (EMPTY, 0)])
def test_a_key_space_is_removed_and_nothing_else(
    master: MooncakeMaster, filled: HiCacheStorage, tmp_path: Path, removed: Any, pages: int
) -> None:
    before = keys(master, tmp_path.name)

    assert pages == filled.remove_space(removed.id)
    assert 0 == filled.remove_space(removed.id)

    left = {key for key in before if removed.id not in key}
    assert left | strangers(tmp_path.name) == keys(master, tmp_path.name)


@pytest.mark.parametrize("is_early", [True, False])
def test_one_that_is_written_to_meanwhile_stays_with_its_manifest(
    filled: HiCacheStorage, monkeypatch: pytest.MonkeyPatch, *, is_early: bool
) -> None:
    """The manifest stays if the page is set early in the removal, and is restored if it is set late."""
    storage: Any = filled
    remove, manifest = storage._remove, storage._layout.manifest(SPACE.id)
    late = hash_of(99)

    def and_then_set(removed: set[str], deadline: Any) -> set[str]:
        leased: set[str] = remove(removed, deadline)
        if is_early or removed == {manifest}:
            native = storage._client._native
            native.put(storage._layout.page(SPACE.id, late), page(seed=1).tobytes())
        return leased

    monkeypatch.setattr(storage, "_remove", and_then_set)

    assert 2 == storage.remove_space(SPACE.id)
    assert SPACE in set(storage.spaces())
    assert [late] == [info.page_hash for info in storage.scan(SPACE)]


def test_a_tenant_s_key_spaces_are_not_removed(master: MooncakeMaster) -> None:
    config = config_of(master, "") | {"tenant_id": "acme"}
    with open_storage("mooncake", config) as storage:
        assert [] == list(storage.unreadable_spaces())
        with pytest.raises(UnsupportedOperation, match="removes no key spaces"):
            storage.remove_space(SPACE.id)
