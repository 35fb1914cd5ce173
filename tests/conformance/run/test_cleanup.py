"""What a run leaves in a store that outlives the run, and how the kit removes it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from hicache_conformance.case.case import LEFT_IN_STORE, Case
from hicache_conformance.checks import all_checks
from hicache_conformance.run.cleanup import remove_pages
from hicache_conformance.run.operator import DeployedStore
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.scenarios.key_space_neighbours import known_similar_ids
from hicache_conformance.tools.processes.child import Link

from hicache_storage.errors import StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page


def _case(path: Path) -> Case:
    return Case(DeployedStore(FileStorage, {"path": str(path)}))


@contextmanager
def _failing(case: Case) -> Generator[None, None, None]:
    with case:
        case.stored(case.open(), case.space(64), 3)
        yield
        raise RuntimeError("the check found something")


def _pages(path: Path) -> int:
    with FileStorage.from_config({"path": str(path)}) as storage:
        return sum(1 for space in storage.spaces() for _ in storage.scan(space))


def _set_two_pages(link: Link, space: KeySpace) -> None:
    storage = link.open_storage()
    storage.open_space(space)
    storage.batch_set(space, ["aa" * 16, "bb" * 16], [Page(bytearray(64)), Page(bytearray(64))])
    link.send("stored")


def test_pages_of_a_check_are_removed(tmp_path: Path) -> None:
    with _case(tmp_path) as case:
        case.stored(case.open(), case.space(64), 5)

    assert _pages(tmp_path) == 0


def test_pages_of_calls_that_are_not_recorded_are_removed(tmp_path: Path) -> None:
    with _case(tmp_path) as case:
        space = case.space(64)
        storage = case.open_storage()
        storage.open_space(space)
        storage.batch_set(space, ["aa" * 16], [Page(bytearray(64))])

    assert _pages(tmp_path) == 0


def test_pages_of_a_child_process_are_removed(tmp_path: Path) -> None:
    with _case(tmp_path) as case:
        assert case.child(_set_two_pages, case.space(64)).receive() == "stored"

    assert _pages(tmp_path) == 0


def test_pages_are_removed_when_the_check_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the check"), _failing(_case(tmp_path)):
        pass

    assert _pages(tmp_path) == 0


def test_pages_of_others_stay(tmp_path: Path) -> None:
    with _case(tmp_path) as others:
        others.stored(others.open(), others.space(64), 4)
        with _case(tmp_path) as case:
            case.stored(case.open(), case.space(64), 5)

        assert _pages(tmp_path) == 4


def test_pages_of_another_run_in_a_key_space_of_both_stay(tmp_path: Path) -> None:
    with _case(tmp_path) as others:
        (_, shared, _), *_ = known_similar_ids()
        theirs = others.open()
        theirs.open_space(shared)
        kept = others.stored(theirs, shared, 2)
        with Case(DeployedStore(FileStorage, {"path": str(tmp_path)}), seed="another") as case:
            ours = case.open()
            ours.open_space(shared)
            case.stored(ours, shared, 3)

        assert theirs.exists(shared, list(kept)) == [True, True]
    assert _pages(tmp_path) == 0


class _Undeletable(MemoryStorage):
    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [False] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        raise StorageUnavailable("the disk is read-only")


def test_pages_that_could_not_be_removed_are_reported() -> None:
    storage = _Undeletable.from_config({})
    with Case(DeployedStore(_Undeletable, {})) as case:
        space = case.space(64)

    told = remove_pages(storage, {space: ["aa" * 16]}, case.scratch.prefix)

    assert case.scratch.prefix in told
    assert "StorageUnavailable: the disk is read-only" in told


def test_a_store_that_no_longer_opens_is_evidence(tmp_path: Path) -> None:
    class Gone(FileStorage):
        gone = False

        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> Gone:
            if cls.gone:
                raise StorageUnavailable("the directory has gone")
            return super().from_config(config)

    with Case(DeployedStore(Gone, {"path": str(tmp_path)})) as case:
        case.stored(case.open(), case.space(64), 1)
        Gone.gone = True

    assert "the directory has gone" in case.evidence[LEFT_IN_STORE]


def test_a_check_that_does_not_end_reports_its_leftovers(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Hangs(FileStorage):
        def batch_get(
            self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
        ) -> list[bool]:
            go_on.wait(60)
            return super().batch_get(space, hashes, pages)

    check = next(one for one in all_checks() if one.run.__name__ == "what_was_set_is_there")
    record = run_check(
        lambda: DeployedStore(Hangs, {"path": str(tmp_path)}), check, RunOptions(call_limit_s=1)
    )
    go_on.set()

    assert "it did not end" in record.evidence[LEFT_IN_STORE]
