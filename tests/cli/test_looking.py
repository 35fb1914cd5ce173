"""Verbs that only look change nothing: pages, bytes, times of use and files stay as they were."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, CliStore
from looks import read_only_mount, snapshot, user_without_rights
from pages import hash_of
from sealed_stores import key_files
from servers import Rclone, RedisServer

from hicache_storage.cli import main

PAGES = 40


@dataclass(frozen=True)
class Place:
    """A store, the directory of its files if it has one, and a function that reads all its data."""

    store: CliStore
    root: Path | None
    seen: Callable[[], dict[str, Any]]


def _on_files(root: Path, name: str, /, **fields: Any) -> Place:
    return Place(CliStore(name, fields), root, lambda: snapshot(root))


def _redis(request: pytest.FixtureRequest, store: CliStore) -> Place:
    redis: Any = importlib.import_module("redis")  # parts of it have no types
    server: RedisServer = request.getfixturevalue("redis_server")

    def seen() -> dict[str, Any]:
        with redis.Redis.from_url(server.url) as client:
            keys = [*client.scan_iter(match=f"{store.config['prefix']}*", count=1000)]
            return {repr(key): client.dump(key) for key in keys}

    return Place(store, None, seen)


def _place(backend: str, request: pytest.FixtureRequest, directory: Path) -> Place:
    root = directory / "kv"
    if backend == "encrypted":
        inner = {"backend": "file", "config": {"path": str(root)}}
        return _on_files(root, backend, **inner, **key_files(directory, "ab"))
    if backend == "fsspec":
        return _on_files(root, backend, url=f"file://{root}")
    if backend in ("file", "hf3fs"):
        return _on_files(root, backend, path=str(root))
    store: CliStore = request.getfixturevalue("store_of")(backend)
    if backend == "redis":
        return _redis(request, store)
    server: Rclone = request.getfixturevalue("s3_server")
    return Place(store, None, lambda: snapshot(server.directory / "data"))


BACKENDS = ("file", "hf3fs", "encrypted", "fsspec", "redis", "s3")
VERBS: dict[str, list[str]] = {
    "ls": ["ls"],
    "ls_space": ["ls", "SPACE"],
    "stats": ["stats", "--watch", "1ms", "--count", "1"],
    "inspect_space": ["inspect", "SPACE"],
    "inspect_page": ["inspect", "SPACE", hash_of(3)],
    "verify": ["verify"],
    "rm": ["rm", "SPACE", hash_of(3)],
    "gc_model": ["gc", "--model", DRAFT.model],
    "gc_age": ["gc", "--unused-for", "1w"],
    "gc_older": ["gc", "--older-than", "1w"],
    "gc_empty": ["gc", "--empty"],
    "gc_unreadable": ["gc", "--unreadable"],
    "copy": ["copy", "--to-backend", "memory"],
    "copy_dry_run": ["copy", "--dry-run", "--to-backend", "memory"],
    "diff": ["diff", "--to-backend", "memory"],
    "diff_verify": ["diff", "--verify", "--to-backend", "memory"],
}
TARGET_VERBS: dict[str, list[str]] = {
    "copy_dry_run": ["copy", "--dry-run"],
    "diff": ["diff"],
    "diff_verify": ["diff", "--verify"],
}
DOCTOR = ["doctor", "--page-bytes", "4KiB", "--pages", "4"]


def _limited(place: Place, nbytes: int) -> CliStore:
    config = place.store.config
    if place.store.backend == "encrypted":
        inner = {**config["config"], "capacity_nbytes": nbytes}
        return replace(place.store, config={**config, "config": inner})
    return replace(place.store, config={**config, "capacity_nbytes": nbytes})


def _filled(place: Place) -> str:
    """Fill a store. Return the beginning of the id of one of its key spaces."""
    target = place.store.fill(range(PAGES))
    place.store.fill(range(PAGES), DRAFT)
    if place.root is not None:
        for path in place.root.rglob("*"):
            if len(path.name) == 64 and path.is_file():  # a page, which was used some time ago
                os.utime(path, (1_700_000_000, 1_700_000_000))
    return target.id[:8]


def _runs_without_a_change(place: Place, store: CliStore, verb: list[str], space_id: str) -> int:
    before = place.seen()
    code = main([*(space_id if word == "SPACE" else word for word in verb), *store.flags])
    after = place.seen()
    assert before == after
    return code


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_verb_that_looks_changes_nothing(
    backend: str, verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    space_id = _filled(place)

    _runs_without_a_change(place, place.store, VERBS[verb], space_id)


@pytest.mark.parametrize("nbytes", [10_000, 170_000], ids=["stale", "full"])
@pytest.mark.parametrize("verb", [*VERBS, "doctor"])
@pytest.mark.parametrize("backend", ["file", "hf3fs", "encrypted"])
def test_nothing_changes_in_a_store_at_its_capacity(
    backend: str, verb: str, nbytes: int, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    space_id = _filled(place)

    argv = VERBS.get(verb, DOCTOR)
    assert _runs_without_a_change(place, _limited(place, nbytes), argv, space_id) in (0, 1, 2)


@pytest.mark.parametrize("verb", [*VERBS, "doctor"])
def test_nothing_changes_without_the_key_of_the_pages(
    verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place("encrypted", request, directory)
    space_id = _filled(place)
    keys = {"keys": {"b": place.store.config["keys"]["b"]}, "current_key": "b", "name_key": "b"}
    store = replace(place.store, config={**place.store.config, **keys})

    assert _runs_without_a_change(place, store, VERBS.get(verb, DOCTOR), space_id) in (1, 2)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("backend", ["file", "hf3fs", "encrypted", "fsspec"])
def test_a_user_without_rights_can_look(
    backend: str, verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    space_id = _filled(place)
    for path in directory.glob("*.key"):
        path.chmod(0o444)
    expected = {
        "rm": {1},
        "gc_model": {1},
        "gc_unreadable": {0},
        "gc_age": {0, 1, 2},
        "gc_older": {0, 1, 2},
        "diff": {1},
        "diff_verify": {1},
    }

    with user_without_rights(place.root or directory):
        code = _runs_without_a_change(place, place.store, VERBS[verb], space_id)

    assert code in expected.get(verb, {0})


@pytest.mark.parametrize("part", ["", "spaces"])
@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_doctor_notices_that_this_user_may_not_write_to_a_full_store(
    backend: str,
    part: str,
    request: pytest.FixtureRequest,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It tries no write there, and a store with a capacity is full most of the time."""
    place = _place(backend, request, directory)
    _filled(place)
    full = _limited(place, 350_000 if backend == "file" else 500_000)
    argv = [*DOCTOR, "--json", *full.flags]
    assert main(argv) == 0
    capsys.readouterr()
    (directory / "kv").chmod(0o777)

    with user_without_rights(directory / "kv" / part):
        code = main(argv)

    found = {one["topic"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert (1, "problem") == (code, found["rights"]["status"])
    assert found["rights"]["fact"] == f"this user may not write to {directory / 'kv' / part}"
    assert found["write"]["fact"].startswith("not tried")


@pytest.mark.parametrize(
    ("backend", "hidden"),
    [("file", hash_of(3)), ("fsspec", hash_of(3)), ("hf3fs", "slots-0000")],
)
def test_a_page_that_the_user_may_not_read_is_not_called_wrong(
    backend: str,
    hidden: str,
    request: pytest.FixtureRequest,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be right, and `--delete-wrong` deletes pages that are wrong."""
    place = _place(backend, request, directory)
    place.store.fill(range(5))
    assert (
        main(["verify", "--json", *place.store.flags]) == 0
    )  # that user may not read Python's files
    capsys.readouterr()

    with user_without_rights(directory / "kv", hidden):
        code = main(["verify", "--json", *place.store.flags])

    printed = capsys.readouterr()
    assert code != 0
    if code == 1:
        assert {"unreadable"} == {one["reason"] for one in json.loads(printed.out)["findings"]}
    else:
        assert "ermission denied" in printed.err


@pytest.mark.parametrize("verb", [*VERBS, "doctor"])
def test_a_store_on_a_read_only_mount_can_be_looked_at(
    verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place("file", request, directory)
    space_id = _filled(place)
    assert place.root is not None

    with read_only_mount(place.root, directory / "mount") as mount:
        store = CliStore("file", {"path": str(mount)})
        code = _runs_without_a_change(place, store, VERBS.get(verb, DOCTOR), space_id)

    expected = {
        "rm": 1,
        "gc_model": 1,
        "gc_age": 2,
        "gc_older": 1,
        "doctor": 1,
        "diff": 1,
        "diff_verify": 1,
    }
    assert code == expected.get(verb, 0)


@pytest.mark.parametrize("verb", [*VERBS, "doctor"])
@pytest.mark.parametrize("backend", ["file", "hf3fs", "fsspec"])
def test_files_of_strangers_stay(
    backend: str, verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    space_id = _filled(place)
    assert place.root is not None
    strange = [place.root / name for name in ("novel.txt", "writing/thesis.tex", "spaces/README")]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("all happy families")
        os.utime(path, (1_700_000_000, 1_700_000_000))

    argv = [space_id if word == "SPACE" else word for word in VERBS.get(verb, DOCTOR)]
    main([*argv, *place.store.flags])

    assert {"all happy families"} == {path.read_text() for path in strange}


@pytest.mark.parametrize("verb", TARGET_VERBS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_that_is_only_looked_at_stays_as_it_was(
    backend: str, verb: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    _filled(place)
    source = CliStore("file", {"path": str(directory / "source")})
    source.fill(range(PAGES + 5))

    before = place.seen()
    code = main([*TARGET_VERBS[verb], *source.flags, *place.store.target_flags])

    assert code in (0, 1)
    assert before == place.seen()


@pytest.mark.parametrize("backend", BACKENDS)
def test_doctor_leaves_pages_and_key_spaces_as_they_were(
    backend: str, request: pytest.FixtureRequest, directory: Path
) -> None:
    place = _place(backend, request, directory)
    _filled(place)

    def listed() -> dict[str, list[str]]:
        with place.store.open() as storage:
            return {
                one.id: sorted(info.page_hash for info in storage.scan(one))
                for one in storage.spaces()
            }

    before = listed()
    assert main([*DOCTOR, *place.store.flags]) == 0
    assert before == listed()
