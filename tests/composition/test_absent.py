"""Parts that do not answer when a composition is opened are taken in later. The others work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import composed_stores
import pytest
from composed_stores import SPACE, file_member, memory_member
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from servers import wait_until

from hicache_storage.errors import ConfigError, HiCacheError, StorageUnavailable
from hicache_storage.registry import open_storage
from hicache_storage.storage import Capabilities, HiCacheStorage

if TYPE_CHECKING:
    from hicache_storage.page import HostBuffer


class Bucket(MemoryStorage):
    """A bucket that a test switches off and on. Its content outlives each opening."""

    is_down = False
    gate: threading.Event | None = None
    """Openings wait for it."""
    opened: ClassVar[list[Bucket]] = []
    alignment = 1

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[HostBuffer] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        assert not config
        if cls.gate is not None:
            assert cls.gate.wait(30)
        if cls.is_down:
            raise StorageUnavailable("bucket: connection refused")
        one = cls()
        vars(one)["capabilities"] = replace(one.capabilities, alignment=cls.alignment)
        if cls.opened:
            one._spaces = cls.opened[0]._spaces
        cls.opened.append(one)
        return one

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.buffers.append(buffer)


@pytest.fixture(autouse=True)
def bucket() -> Iterator[type[Bucket]]:
    yield Bucket
    if Bucket.gate is not None:
        Bucket.gate.set()
    Bucket.is_down, Bucket.gate, Bucket.alignment = False, None, 1
    Bucket.opened = []


BUCKET = {
    "name": "bucket",
    "backend": "dynamic",
    "config": {"backend_name": "bucket", "module_path": __name__, "class_name": "Bucket"},
}


def tiered(root: Path, **bucket: Any) -> HiCacheStorage:
    tiers = [file_member("disk", root / "disk"), {**BUCKET, **bucket}]
    return open_storage("tiered", {"tiers": tiers, "breaker_cooldown_s": 0.05, "timeout_s": 2})


def save(storage: HiCacheStorage) -> list[bool]:
    return composed_stores.save(storage, 32)


def load(storage: HiCacheStorage) -> list[bool]:
    return composed_stores.load(storage, 32)


def test_a_bucket_that_is_down_leaves_the_disk(tmp_path: Path) -> None:
    with tiered(tmp_path) as storage:
        save(storage)
    Bucket.is_down = True

    with tiered(tmp_path) as storage:
        assert [True] * 32 == load(storage)
        assert [True] * 32 == save(storage)
        assert {"disk": "closed", "bucket": "absent"} == storage.stats().part_states
        (said,) = (one for one in storage.diagnose() if one.topic == "bucket: state")
        assert said.fact == "it does not answer: bucket: connection refused"


def test_a_bucket_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    Bucket.is_down = True
    buffer = bytearray(64)
    with tiered(tmp_path) as storage:
        storage.register_buffer(buffer)
        save(storage)
        Bucket.is_down = False

        def stores() -> bool:
            save(storage)
            there = [hash_of(number) for number in range(32)]
            return bool(Bucket.opened) and [True] * 32 == Bucket.opened[0].batch_exists(
                SPACE, there
            )

        wait_until(stores)
        assert "closed" == storage.stats().part_states["bucket"]
        assert Bucket.opened[0].buffers[0] is buffer
    assert 1 == len(Bucket.opened)
    with pytest.raises(HiCacheError, match="was closed"):
        Bucket.opened[0].stats()


def test_no_call_waits_for_an_opening_that_hangs(tmp_path: Path) -> None:
    Bucket.is_down = True
    with tiered(tmp_path) as storage:
        Bucket.gate = threading.Event()
        wait_until(lambda: not save(storage).count(False) and _is_opening())

        for _ in range(20):
            began_s = time.monotonic()
            assert [True] * 32 == save(storage)
            assert [True] * 32 == load(storage)
            assert time.monotonic() - began_s < 1
        names = [one.name for one in threading.enumerate()]
        assert 1 == names.count("open tier 'bucket'")


def test_a_storage_that_was_closed_closes_what_opens_late(tmp_path: Path) -> None:
    Bucket.is_down = True
    storage = tiered(tmp_path)
    Bucket.gate, Bucket.is_down = threading.Event(), False
    wait_until(lambda: not save(storage).count(False) and _is_opening())

    storage.close()
    Bucket.gate.set()

    wait_until(lambda: bool(Bucket.opened) and not _is_opening())
    with pytest.raises(HiCacheError, match="was closed"):
        Bucket.opened[0].stats()


def _is_opening() -> bool:
    return any(one.name == "open tier 'bucket'" for one in threading.enumerate())


def test_a_composition_is_as_usable_after_a_fork_as_its_absent_part(tmp_path: Path) -> None:
    """The part may come back before the fork."""
    assert not Bucket.usable_after_fork
    Bucket.is_down = True

    with tiered(tmp_path) as storage:
        assert not storage.usable_after_fork


def test_a_required_part_must_answer(tmp_path: Path) -> None:
    Bucket.is_down = True

    with pytest.raises(StorageUnavailable, match=r"^tiered: tiers.bucket: bucket: connection"):
        tiered(tmp_path, required=True)


def test_some_part_must_answer() -> None:
    Bucket.is_down = True
    tiers = [{**BUCKET, "name": name} for name in "ab"]

    with pytest.raises(StorageUnavailable, match=r"^tiered: tiers.a: bucket: connection refused"):
        open_storage("tiered", {"tiers": tiers})


def test_a_wrong_config_is_no_absence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown field 'url'"):
        open_storage("tiered", {"tiers": [memory_member("a"), memory_member("b", url="x")]})


@pytest.mark.parametrize("backend", ["striped", "tiered"])
def test_a_disk_that_the_system_refuses_is_absent(tmp_path: Path, backend: str) -> None:
    (tmp_path / "b").write_text("no directory")
    field = {"striped": "stripes", "tiered": "tiers"}[backend]
    members = [file_member(name, tmp_path / name) for name in "ba"]

    with open_storage(backend, {field: members}) as storage:
        assert True in save(storage)
        assert {"a": "closed", "b": "absent"} == storage.stats().part_states


def test_one_stripe_of_two_costs_its_share(tmp_path: Path) -> None:
    stripes = [file_member("a", tmp_path / "a"), BUCKET]
    config = {"stripes": stripes, "breaker_cooldown_s": 0.05}
    Bucket.is_down = True

    with open_storage("striped", config) as storage:
        stored = save(storage)
        assert {True, False} == set(stored)
        assert stored == load(storage)
        Bucket.is_down = False
        wait_until(lambda: [True] * 32 == save(storage))
        assert [True] * 32 == load(storage)


def test_a_part_that_needs_other_pages_than_were_promised_stays_absent(tmp_path: Path) -> None:
    Bucket.is_down = True
    with tiered(tmp_path) as storage:
        Bucket.alignment, Bucket.is_down = 4096, False

        def refusal() -> bool:
            save(storage)
            return any("alignment 4096" in one.fact for one in storage.diagnose())

        wait_until(refusal)
        assert "absent" == storage.stats().part_states["bucket"]
        assert Capabilities().alignment == storage.capabilities.alignment


def test_a_change_by_a_verb_needs_all_parts(tmp_path: Path) -> None:
    """Otherwise what it removes would come back with the part."""
    Bucket.is_down = True
    with tiered(tmp_path) as storage:
        save(storage)
        with pytest.raises(StorageUnavailable, match="tier 'bucket'"):
            storage.clear(SPACE)
