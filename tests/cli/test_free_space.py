"""Verbs that write take the free space of a store, and without `--evict` no page of an engine.

Each verb runs against each kind of store, empty, with much or little free space, or full of pages that
may belong to another deployment.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore
from pages import space
from sealed_stores import key_files
from servers import RedisCluster, RedisServer

from hicache_storage.cli import main
from hicache_storage.cli.operations.free_space import Trial, largest_shortage
from hicache_storage.config import StorageChoice

PAGES = 24
SPACE = space(page_nbytes=1 << 16)
VERBS: dict[str, list[str]] = {
    "doctor": ["doctor", "--page-bytes", "256KiB"],
    "bench": [
        *("bench", "--page-bytes", "64KiB", "--working-set", "2MiB"),
        *("--pages", "64", "--threads", "2"),
    ],
    "replay": ["replay", "--conversations", "4", "--requests", "8", "--host-size", "16MiB"],
    "replay_keep": [
        *("replay", "--conversations", "4", "--requests", "8", "--host-size", "16MiB"),
        "--keep",
    ],
    "copy": ["copy"],
}
FREE = {"full": 1 << 18, "nearly_full": 1 << 20, "half_full": 1 << 30}
"""The bytes that are free beside the pages of the engine."""


@dataclass
class Place:
    """A store of engines, and a function that limits it to what it uses and some bytes more."""

    store: CliStore
    limited: Callable[[int], CliStore]
    others: list[CliStore] = field(default_factory=list[CliStore])
    """Other deployments on the same server."""


def _files(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a member `file` in the form of a composition."""
    return {"name": Path(config["path"]).name, "backend": "file", "config": config}


def _used_nbytes(path: Path) -> int:
    sizes = [one.stat().st_size for one in path.rglob("*") if len(one.name) == 64]
    return sum(sizes)


def _place_of_files(backend: str, root: Path) -> Place:
    paths = [root / name for name in ("a", "b")]

    def made(*free: int) -> CliStore:
        configs: list[dict[str, Any]] = [{"path": str(path)} for path in paths]
        for config, path, nbytes in zip(configs, paths, free, strict=False):
            if backend == "hf3fs":
                config["capacity_nbytes"] = int((PAGES * (72 << 10) + nbytes) / 0.95)
            else:
                config["capacity_nbytes"] = _used_nbytes(path) + nbytes
        if backend == "encrypted":
            sealed = {"backend": "file", "config": configs[0], **key_files(root, "a")}
            return CliStore(backend, sealed)
        if backend == "tiered":
            return CliStore(backend, {"tiers": [_files(one) for one in configs]})
        if backend == "striped":
            return CliStore(
                backend, {"stripes": [_files(one) for one in configs], "weights": {"a": 1, "b": 1}}
            )
        return CliStore(backend, configs[0])

    limits = 2 if backend == "striped" else 1
    return Place(made(), lambda free: made(*[free] * limits))


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RedisServer]]:
    """Yield a Redis of each policy."""
    policies = ("volatile-ttl", "allkeys-lru", "noeviction")
    servers = {
        one: RedisServer(tmp_path_factory.mktemp(one), "--maxmemory-policy", one)
        for one in policies
    }
    try:
        for server in servers.values():
            server.start()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def _client(server: RedisServer) -> Any:
    return importlib.import_module("redis").Redis.from_url(server.url)


def _limit(server: RedisServer, free: int) -> None:
    with _client(server) as client:
        client.config_set("maxmemory", client.info()["used_memory"] + free)


def _place(kind: str, request: pytest.FixtureRequest, root: Path) -> Place:
    backend, _, policy = kind.partition(" ")
    if backend == "redis":
        server: RedisServer = request.getfixturevalue("caches")[policy]
        with _client(server) as client:
            client.config_set("maxmemory", 0)
            client.flushall()
        expiry = {"ttl_s": "1d"} if policy.startswith("volatile") else {}
        config = {"url": server.url, "prefix": "ours:", **expiry}
        store = CliStore(backend, config)

        def limited(free: int) -> CliStore:
            _limit(server, free)
            return store

        return Place(store, limited, [replace(store, config={**config, "prefix": "theirs:"})])
    if backend in ("s3", "fsspec"):
        store = request.getfixturevalue("store_of")("s3")
        if backend == "fsspec":
            store = CliStore(backend, {"url": f"file://{root}/kv"})
        return Place(store, lambda _: store)
    return _place_of_files(backend, root)


KINDS = (
    *("file", "hf3fs", "encrypted", "tiered", "striped", "s3", "fsspec"),
    *("redis volatile-ttl", "redis allkeys-lru", "redis noeviction"),
)
LIMITED = [kind for kind in KINDS if kind not in ("s3", "fsspec")]


def _argv(verb: str, store: CliStore, source: CliStore) -> list[str]:
    if verb == "copy":
        return [*VERBS[verb], *source.flags, *store.target_flags]
    return [*VERBS[verb], *store.flags]


@pytest.fixture
def source(tmp_path: Path) -> CliStore:
    """Return a store of 80 pages, which are 5 MiB, to copy from."""
    store = CliStore("file", {"path": str(tmp_path / "source")})
    store.fill(range(100, 180), SPACE)
    return store


@pytest.mark.parametrize(
    ("kind", "free"),
    [(kind, free) for kind in KINDS for free in FREE if kind in LIMITED or free == "half_full"],
)
def test_no_page_is_lost_without_the_flag(
    kind: str,
    free: str,
    source: CliStore,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    place = _place(kind, request, tmp_path)
    key_space = place.store.fill(range(PAGES), SPACE)
    for other in place.others:
        other.fill(range(PAGES), SPACE)
    for verb in VERBS:
        limited = place.limited(FREE[free])
        code = main(_argv(verb, limited, source))

        refused = free != "half_full" and verb != "doctor"
        # engines can store nothing on such a server
        is_problem = (kind, free, verb) == ("redis noeviction", "full", "doctor")
        assert code == (2 if refused else 1 if is_problem else 0), verb
        for store in (limited, *place.others):
            assert [*range(PAGES)] == [one for one in store.numbers(key_space) if one < 100], verb


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", LIMITED)
def test_with_the_flag_a_full_store_gets_new_pages(
    kind: str,
    verb: str,
    source: CliStore,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    place = _place(kind, request, tmp_path)
    key_space = place.store.fill(range(PAGES), SPACE)

    assert main([*_argv(verb, place.limited(1 << 20), source), "--evict"]) in (0, 1)

    is_lasting = kind in ("redis noeviction", "tiered")  # a full server refuses; the bucket has all
    assert is_lasting is (PAGES == sum(n < 100 for n in place.store.numbers(key_space)))


@pytest.mark.parametrize("verb", ["bench", "replay", "copy"])
def test_a_refusal_names_the_part_the_bytes_and_the_way_out(
    verb: str,
    source: CliStore,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = _place("striped", request, tmp_path)
    place.store.fill(range(PAGES), SPACE)

    assert main(_argv(verb, place.limited(1 << 20), source)) == 2

    message = capsys.readouterr().err
    assert ("the target has 1 MiB free in a" if verb == "copy" else "a has 1 MiB free") in message
    assert "--evict" in message


@pytest.mark.parametrize(("backend", "free"), [("tiered", (40, 400)), ("striped", (20, 400))])
def test_each_part_takes_its_share_of_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, free: tuple[int, int]
) -> None:
    """The parts together have room for the copy, but one of them has none for its share."""
    source = CliStore("file", {"path": str(tmp_path / "source")})
    source.fill(range(60), SPACE)
    field, key = ("tiers", "tiered") if backend == "tiered" else ("stripes", "striped")
    parts = [
        _files({"path": str(tmp_path / name), "capacity_nbytes": (each + 8) * SPACE.page_nbytes})
        for name, each in zip("ab", free, strict=True)
    ]
    weights = {"weights": {"a": 1, "b": 1}} if backend == "striped" else {}
    target = CliStore(key, {field: parts, **weights})
    target.fill(range(100, 104), replace(SPACE, model="engine"))

    flags = [*source.flags, "--to-backend", target.backend, "--to-extra-config"]
    assert 2 == main(["copy", *flags, json.dumps(target.config)])
    message = capsys.readouterr().err
    assert "the target has" in message
    assert (backend == "tiered") == ("--to-tier" in message)


def test_stripes_on_one_file_system_have_its_free_space_together(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in "ab"}
    parts = [_files({"path": str(path)}) for path in paths.values()]
    store = CliStore("striped", {"stripes": parts})
    choice = StorageChoice(backend=store.backend, config=store.config)
    with store.open() as storage:
        shortage = largest_shortage(choice, storage, {"": 1 << 60})

    system = os.statvfs(tmp_path)
    assert shortage is not None
    assert ("a, b", 1 << 60) == (shortage.names, shortage.needed_nbytes)
    assert shortage.free_nbytes == pytest.approx(system.f_bavail * system.f_frsize, rel=0.1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "redis" not in kind])
def test_an_empty_store_has_nothing_to_lose(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = _place(kind, request, tmp_path)
    place.store.open().close()

    for verb in ("bench", "replay"):
        assert main([*VERBS[verb], *place.limited(1 << 20).flags]) in (0, 1), verb


def test_the_smallest_server_of_a_cluster_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisCluster(tmp_path, "--maxmemory-policy", "allkeys-lru") as cluster:
        store = CliStore("redis", {"url": cluster.nodes[0].url, "cluster": True})
        key_space = store.fill(range(PAGES), SPACE)
        _limit(cluster.nodes[0], 1 << 26)
        _limit(cluster.nodes[1], 1 << 20)

        assert main([*VERBS["bench"], *store.flags]) == 2
        assert main([*VERBS["doctor"], *store.flags]) == 0

        assert [*range(PAGES)] == store.numbers(key_space)
    assert "KiB free" in capsys.readouterr().err


def test_doctor_says_what_it_wrote(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _place("tiered", request, tmp_path)
    place.store.fill(range(PAGES), SPACE)

    assert main([*VERBS["doctor"], "--json", *place.limited(1 << 20).flags]) == 0
    found = {one["topic"]: one for one in json.loads(capsys.readouterr().out)["checks"]}

    reduced = "1 page of 256 KiB, as much as fits without an eviction"
    assert found["write"]["fact"].startswith(f"{reduced}: ")
    assert found["a: speed"]["fact"].startswith(f"{reduced}, write ")
    assert found["b: speed"]["fact"].startswith("write ")


def test_doctor_tries_the_parts_that_are_not_full(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = _place("tiered", request, tmp_path)
    place.store.fill(range(PAGES), SPACE)

    assert main([*VERBS["doctor"], "--json", *place.limited(0).flags]) == 0
    found = {one["topic"]: one for one in json.loads(capsys.readouterr().out)["checks"]}

    assert found["write"]["fact"].startswith("not tried: a is full, or hides its free space")
    assert found["a: write"]["fact"].startswith("not tried")
    assert found["a: speed"]["fact"].startswith("read ")
    assert found["b: speed"]["fact"].startswith("write ")


@pytest.mark.parametrize(
    ("free", "trial"),
    [
        (1 << 30, Trial(8, 1 << 20)),
        (5 << 20, Trial(2, 1 << 20)),
        (1 << 20, Trial(1, 1 << 18)),
        (9000, Trial(1, 4096)),
        (8192, None),
    ],
)
def test_a_trial_has_fewer_pages_before_it_has_smaller_ones(free: int, trial: Trial | None) -> None:
    assert trial == Trial(8, 1 << 20).within(free, alignment=1)
