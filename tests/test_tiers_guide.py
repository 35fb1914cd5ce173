"""The shapes in docs/tiers.md open over real stores, and lose what the page says that they lose."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from documents import code_blocks
from hicache_backends.striped.placement import Placement
from pages import hash_of, page, space
from redis_servers import client_of_one
from s3_kit import config_of
from sealed_stores import key_files
from servers import ROOT, Rclone, RedisServer, wait_until

from hicache_storage import open_storage
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, Transfer
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import HiCacheStorage

GUIDE = (ROOT / "docs/tiers.md").read_text(encoding="utf-8")
FLAGS = re.compile(r"--hicache-storage-backend (\w+) --\S+-extra-config '(.*)'", re.DOTALL)
SHAPES = [
    (found[1], json.loads(found[2]))
    for block in code_blocks(GUIDE, "sh")
    if (found := FLAGS.search(block))
]
RACK, DISKS, FLEET, SEALED_BELOW, SEALED_ABOVE = range(len(SHAPES))
SPACE = space()
COUNT = 64
PATIENT = {"timeout_s": 30, "lookup_timeout_s": 30}
"""A busy machine costs no hits here."""


class Site:
    """The stores of a site. A shape of the guide is opened over them, at small sizes."""

    def __init__(self, root: Path, redis: RedisServer, bucket: Rclone) -> None:
        self.root = root
        self.redis = redis
        self.bucket = bucket
        self._opened = ExitStack()

    def disk(self, name: str) -> Path:
        """Return the directory of a disk."""
        return self.root / name

    def files(self, name: str) -> set[str]:
        """Return the hashes of the pages on a disk."""
        return {path.name for path in self.disk(name).glob("spaces/*/??/*")}

    def place(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a config of the guide with the places, sizes and time limits of this site."""
        placed: dict[str, Any] = {
            key: self.place(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
            for key, value in config.items()
        }
        for parts in ("tiers", "stripes"):
            if parts in placed:
                placed[parts] = [self.place(member) for member in placed[parts]]
                placed |= PATIENT
        if "path" in placed:
            disk = Path(placed["path"]).parent.name
            placed |= {"path": str(self.disk(disk)), "capacity_nbytes": "64MiB"}
        if "url" in placed:
            placed["url"] = self.redis.url
        if "bucket" in placed:
            placed |= config_of(self.bucket, f"{self.root.name}/")
        if "keys" in placed:
            placed["timeout_s"] = PATIENT["timeout_s"]  # the store below gets half of it
            placed["config"].pop("timeout_s", None)
            placed["keys"] = {placed["current_key"]: key_files(self.root)["keys"]["a"]}
        return placed

    def open(self, shape: int) -> Shape:
        """Open a shape of the guide."""
        backend, config = SHAPES[shape]
        return self.open_config(backend, self.place(config))

    def open_config(self, backend: str, config: dict[str, Any]) -> Shape:
        """Open a store with a config of this site."""
        storage = self._opened.enter_context(open_storage(backend, config))
        store = self._opened.enter_context(PageStore(storage))
        store.open_space(SPACE)
        return Shape(storage, store)

    def close(self) -> None:
        """Close what is open, so that all copies have ended."""
        self._opened.close()


class Shape:
    """An open store of a site, and pages to store in it."""

    def __init__(self, storage: HiCacheStorage, store: PageStore) -> None:
        self.storage = storage
        self.store = store

    def _transfer(self, numbers: range, payloads: list[Page]) -> Transfer:
        return Transfer(SPACE, [hash_of(number) for number in numbers], payloads)

    def save(self, numbers: range = range(COUNT)) -> int:
        """Store pages. Return how many were stored."""
        payloads = [page(SPACE.page_nbytes, seed=number) for number in numbers]
        return self.store.save([self._transfer(numbers, payloads)]).arrived()

    def load(self, numbers: range = range(COUNT)) -> set[str]:
        """Read pages. Return the hashes of the hits, whose bytes are compared."""
        payloads = [page(SPACE.page_nbytes, seed=-1) for _ in numbers]
        (verdicts,) = self.store.load([self._transfer(numbers, payloads)]).verdicts
        hits = [n for n, verdict in enumerate(verdicts) if verdict is Verdict.OK]
        for n in hits:
            assert payloads[n].tobytes() == page(SPACE.page_nbytes, seed=numbers[n]).tobytes()
        return {hash_of(numbers[n]) for n in hits}


ALL = {hash_of(number) for number in range(COUNT)}
NEW = range(COUNT, 2 * COUNT)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Rclone]]:
    root = tmp_path_factory.mktemp("servers")
    with RedisServer(root / "redis") as redis, Rclone(root / "bucket") as bucket:
        yield redis, bucket


@pytest.fixture
def site(tmp_path: Path, servers: tuple[RedisServer, Rclone]) -> Iterator[Site]:
    redis, bucket = servers
    with client_of_one(redis) as client:
        client.flushall()
    made = Site(tmp_path, redis, bucket)
    yield made
    made.close()


@pytest.fixture
def stop(servers: tuple[RedisServer, Rclone]) -> Iterator[Callable[[RedisServer | Rclone], None]]:
    """Return a function that stops a server until the test has ended."""
    stopped: list[RedisServer | Rclone] = []

    def stop(server: RedisServer | Rclone) -> None:
        server.stop()
        stopped.append(server)

    yield stop
    for server in stopped:
        server.start()


Stop = Callable[[RedisServer | Rclone], None]


def damage(root: Path, page_hash: str) -> None:
    """Flip a bit of the payload of a page on a disk."""
    (file,) = root.glob(f"spaces/*/??/{page_hash}")
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)


def wipe(root: Path) -> None:
    """Remove the pages of a disk."""
    for shard in root.glob("spaces/*/??"):
        shutil.rmtree(shard)


@pytest.mark.parametrize("shape", [RACK, DISKS, FLEET, SEALED_BELOW, SEALED_ABOVE])
def test_a_shape_returns_what_it_stored(shape: int, site: Site) -> None:
    opened = site.open(shape)

    assert COUNT == opened.save()
    assert ALL == opened.load()


class TestDisks:
    def test_a_dead_disk_costs_its_own_pages(self, site: Site) -> None:
        shape = site.open(DISKS)
        shape.save()
        lost = site.files("d3")

        site.disk("d3").rename(site.root / "away")

        assert 0 < len(lost) < COUNT / 3
        assert ALL - lost == shape.load()

    def test_a_wiped_disk_is_filled_again(self, site: Site) -> None:
        shape = site.open(DISKS)
        shape.save()
        lost = site.files("d3")
        wipe(site.disk("d3"))

        assert ALL - lost == shape.load()
        assert COUNT == shape.save()
        assert ALL == shape.load()

    def test_a_damaged_page_is_a_miss_and_stored_again(self, site: Site) -> None:
        shape = site.open(DISKS)
        shape.save()
        damaged = min(site.files("d3"))
        damage(site.disk("d3"), damaged)

        assert ALL - {damaged} == shape.load()
        shape.save()
        assert ALL == shape.load()

    def test_a_prefix_ends_after_seven_pages_if_one_disk_of_eight_is_dead(self) -> None:
        placement = Placement({f"d{number}": 1.0 for number in range(8)})
        lost = placement.split([hash_of(number) for number in range(50_000)])[0]

        gaps = [later - earlier - 1 for earlier, later in pairwise(lost)]

        assert 7 == pytest.approx(sum(gaps) / len(gaps), rel=0.05)

    def test_without_the_dead_disk_the_others_keep_their_pages(self, site: Site) -> None:
        site.open(DISKS).save()
        lost = site.files("d3")
        site.close()
        stripes = [one for one in SHAPES[DISKS][1]["stripes"] if one["name"] != "d3"]

        shape = site.open_config("striped", site.place({"stripes": stripes}))

        assert ALL - lost == shape.load()
        assert COUNT == shape.save()
        assert ALL == shape.load()


class TestRack:
    def test_redis_serves_if_the_disk_is_dead(self, site: Site) -> None:
        shape = site.open(RACK)
        shape.save()

        site.disk("nvme0").rename(site.root / "away")

        assert ALL == shape.load()
        assert COUNT == shape.save(NEW)

    def test_the_disk_serves_if_redis_is_dead(self, site: Site, stop: Stop) -> None:
        shape = site.open(RACK)
        shape.save()

        stop(site.redis)

        assert ALL == shape.load()
        assert COUNT == shape.save(NEW)

    def test_pages_do_not_return_to_a_wiped_redis(self, site: Site) -> None:
        shape = site.open(RACK)
        shape.save()
        with client_of_one(site.redis) as client:
            client.flushall()

            assert ALL == shape.load()
            site.close()
            assert 0 == client.dbsize()

    def test_promotion_fills_a_wiped_disk(self, site: Site) -> None:
        shape = site.open(RACK)
        shape.save()
        wipe(site.disk("nvme0"))

        assert ALL == shape.load()
        assert set() == site.files("nvme0")
        assert ALL == shape.load()
        wait_until(lambda: site.files("nvme0") == ALL)

    def test_a_page_that_is_damaged_on_the_disk_is_a_hit_and_healed(self, site: Site) -> None:
        shape = site.open(RACK)
        shape.save()
        damage(site.disk("nvme0"), hash_of(5))

        assert ALL == shape.load()
        wait_until(lambda: site.files("nvme0") == ALL)
        assert 1 == shape.storage.stats().counters["disk.wrong_pages"]


class TestFleet:
    def test_the_bucket_serves_the_pages_of_a_dead_disk(self, site: Site) -> None:
        shape = site.open(FLEET)
        shape.save()
        site.close()  # waits for the copies
        shape = site.open(FLEET)

        site.disk("d0").rename(site.root / "away")

        assert ALL == shape.load()
        assert COUNT == shape.save(NEW)
        assert len(NEW) == len(shape.load(NEW))

    def test_the_disks_serve_if_the_bucket_is_dead(self, site: Site, stop: Stop) -> None:
        shape = site.open(FLEET)
        shape.save()

        stop(site.bucket)

        assert ALL == shape.load()
        assert COUNT == shape.save(NEW)


class TestSealed:
    def test_a_sealed_tier_heals_the_tier_above(self, site: Site) -> None:
        shape = site.open(SEALED_BELOW)
        shape.save()
        damage(site.disk("nvme0"), hash_of(5))

        assert ALL == shape.load()

    def test_a_damaged_page_below_a_seal_is_read_from_the_next_tier(self, site: Site) -> None:
        shape = site.open(SEALED_ABOVE)
        shape.save()
        (sealed,) = list(site.files("nvme0"))[:1]
        damage(site.disk("nvme0"), sealed)

        assert ALL == shape.load()
        assert ALL == shape.load()


class TestChanges:
    def test_a_store_in_use_gets_a_tier_below(self, site: Site) -> None:
        site.open_config("file", {"path": str(site.disk("nvme0"))}).save()
        site.close()

        assert ALL == site.open(RACK).load()

    def test_a_store_in_use_gets_a_tier_above(self, site: Site) -> None:
        site.open_config("redis", {"url": site.redis.url}).save()
        site.close()

        assert ALL == site.open(RACK).load()

    def test_a_store_in_use_becomes_a_stripe(self, site: Site) -> None:
        site.open_config("file", {"path": str(site.disk("d3"))}).save()
        site.close()
        shares = {one["name"]: 1.0 for one in SHAPES[DISKS][1]["stripes"]}
        kept = Placement(shares).split([hash_of(number) for number in range(COUNT)])[3]

        assert {hash_of(number) for number in kept} == site.open(DISKS).load()

    def test_a_delete_does_not_reach_a_page_whose_place_has_changed(self, site: Site) -> None:
        stripes = SHAPES[DISKS][1]["stripes"]
        site.open_config("striped", site.place({"stripes": stripes[1:]})).save()
        site.close()
        shape = site.open(DISKS)
        hashes = sorted(ALL - shape.load())

        assert len(hashes) == shape.store.delete(SPACE, hashes)
        framed = shape.store.framed(SPACE)
        assert ALL == {info.page_hash for info in shape.storage.scan(framed)}
        assert COUNT == shape.storage.clear(framed)
        assert set() == {info.page_hash for info in shape.storage.scan(framed)}

    def test_a_part_with_a_larger_alignment_changes_key_spaces(self, site: Site) -> None:
        before = site.open(RACK).store.framed(SPACE)
        config = site.place(SHAPES[RACK][1])
        config["tiers"][0]["config"]["durability"] = "power"

        assert before != site.open_config("tiered", config).store.framed(SPACE)


def test_a_part_that_does_not_open_costs_its_hits_only(site: Site, stop: Stop) -> None:
    site.open(RACK).save()
    site.close()
    stop(site.redis)

    shape = site.open(RACK)

    assert ALL == shape.load()
    assert COUNT == shape.save(NEW)
    assert "absent" == shape.storage.stats().part_states["rack"]
    assert "rack: state" in {one.topic for one in shape.storage.diagnose()}
