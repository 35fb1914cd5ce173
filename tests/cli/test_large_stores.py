"""The verbs on stores of many pages, and a copy that is killed half way, for every backend."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore, run_json
from pages import hash_of, space
from s3_kit import make_ready
from servers import Ministack, wait_until
from verb_processes import COMMAND, verb

from hicache_storage import KeySpace
from hicache_storage.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = space(page_nbytes=256)


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    """Return an S3 server that stores an object whole or not at all.

    rclone's server, on which other tests run, keeps the start of an object whose put was killed
    under the size of the whole object: no client can read it, or find out that it is incomplete.
    """
    with Ministack(tmp_path_factory.mktemp("s3")) as server:
        make_ready(server)
        yield server


def _filled(store: CliStore, pages: int) -> KeySpace:
    return [store.fill(range(n, n + 1000), SMALL) for n in range(0, pages, 1000)][-1]


def _patient(store: CliStore) -> CliStore:
    """Return the store with a time limit that suits a busy machine: a time-out ends a copy."""
    return CliStore(store.backend, {**store.config, "timeout_s": 60})


def _count(store: CliStore, key_space: KeySpace, pages: int) -> int:
    hashes = [hash_of(number) for number in range(pages)]
    with store.open() as storage:
        return sum(
            sum(storage.batch_exists(key_space, hashes[start : start + 64]))
            for start in range(0, pages, 64)
        )


@pytest.mark.parametrize("pages", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_all_pages_are_listed_verified_and_removed(
    pages: int, store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("redis")
    target = _filled(store, pages)

    assert main(["ls", target.id, *store.flags]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == pages
    _, found = run_json(capsys, "verify", *store.flags)
    assert found["proofs"]["ok"] == pages
    _, gone = run_json(capsys, "gc", "--space", target.id, "--yes", *store.flags)
    assert gone["removed_pages"] == pages


@pytest.mark.parametrize("pages", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_copy_through_every_store_is_killed_twice_and_loses_nothing(
    store_of: Callable[[str], CliStore],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pages: int,
) -> None:
    chain = [_patient(store_of(name)) for name in ("file", "redis", "s3", "hf3fs", "file")]
    key_space = _filled(chain[0], pages)

    for number, (source, target) in enumerate(pairwise(chain)):
        argv = ["copy", *source.flags, *target.target_flags]
        before = 0
        if number in (0, 1):
            before = _killed(tmp_path, argv, target, key_space, pages)
        done = subprocess.run(
            [*COMMAND, *argv, "--json"], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert 0 == done.returncode, done.stderr
        copied: dict[str, Any] = json.loads(done.stdout)
        # A server may carry out a write of the killed process after the count.
        assert before <= copied["skipped_pages"]
        assert pages == copied["skipped_pages"] + copied["copied_pages"]

    code, found = run_json(capsys, "verify", *chain[-1].flags)
    assert (0, pages) == (code, found["proofs"]["ok"])
    assert [key_space.id] == [one["id"] for one in _spaces(chain[-1], capsys)]


def _killed(
    directory: Path, argv: list[str], target: CliStore, key_space: KeySpace, pages: int
) -> int:
    """Kill a copy half way. Return the number of pages that the target has then."""
    limit = ["--bandwidth-limit", "10KB"]
    with verb(directory, *argv, *limit) as process:
        wait_until(lambda: _count(target, key_space, pages) > pages // 100, 120)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    found = _count(target, key_space, pages)
    assert found < pages
    return found


def _spaces(store: CliStore, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(run_json(capsys, "ls", *store.flags)[1]["spaces"])
