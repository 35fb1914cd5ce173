"""The look-up of pages, by listing or one by one."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from fsspec_stores import LIMIT_S, SPACE, Hooks, open_store, page_file
from hicache_backends.fsspec.lookup import Lookup
from pages import hash_of, page

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_backends.fsspec import FsspecStorage


class TestLookup:
    def test_few_pages_are_asked_for_one_by_one(self) -> None:
        assert Lookup(0.001).budget_s("space", 50) == 0

    def test_a_listing_may_take_what_the_pages_would(self) -> None:
        assert Lookup(0.001).budget_s("space", 500) == pytest.approx(0.5)

    def test_the_faster_kind_of_lookup_is_chosen(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("large", 10.0, done=True)
        lookup.note_listing("small", 0.01, done=True)

        assert lookup.budget_s("large", 100) == 0
        assert lookup.budget_s("small", 100) > 0

    def test_the_latency_of_single_lookups_is_estimated(self) -> None:
        lookup = Lookup(0.01)
        for _ in range(50):
            lookup.note_pages(100, 0.01)

        assert lookup.budget_s("space", 500) == 0

    def test_the_latency_of_one_page_is_not_that_of_many(self) -> None:
        lookup = Lookup(0.0001)
        lookup.note_pages(1, 60.0)

        assert lookup.budget_s("space", 100) == 0

    def test_a_listing_that_was_given_up_is_not_tried_at_once(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("space", 1.0, done=False)

        assert lookup.budget_s("space", 200) == 0

    def test_it_is_tried_again_in_the_end(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("space", 10.0, done=True)

        assert any(lookup.budget_s("space", 100) for _ in range(50))


class TestExists:
    def test_a_listing_and_single_questions_agree(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        hashes = [hash_of(number) for number in range(40)]
        local.batch_set(SPACE, hashes[::2], [page() for _ in hashes[::2]])
        page_file(tmp_path, hashes[2]).write_bytes(b"cut")
        one_by_one = local.batch_exists(SPACE, hashes)
        listed = local._lookup.list_pages(local._mounts.get(), SPACE, LIMIT_S, Deadline(LIMIT_S))

        assert one_by_one == [number % 2 == 0 and number != 2 for number in range(40)]
        assert listed == {h for h, there in zip(hashes, one_by_one, strict=True) if there}

    def test_a_listing_and_the_pages_share_the_time(self, scripted: Hooks) -> None:
        gate = threading.Event()
        hashes = [hash_of(number) for number in range(2000)]
        with open_store("scripted://kv", timeout_s=1.0) as store:
            store.batch_exists(SPACE, hashes)  # from here on a listing is worth a try
            store._lookup._page_s = 0.01
            scripted.before_look = lambda _: gate.wait(LIMIT_S)
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                store.batch_exists(SPACE, hashes)
            elapsed_s = time.monotonic() - began_s
            gate.set()

        assert elapsed_s < 1.9


def test_key_spaces_that_were_never_listed_are_not_remembered() -> None:
    lookup = Lookup(0.001)
    for number in range(10):
        lookup.budget_s(f"space-{number}", 20)

    assert {} == lookup._listing_s
