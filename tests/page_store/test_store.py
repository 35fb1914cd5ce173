from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from framed import DRAFT, HASHES, NBYTES, TARGET, bytes_of, empty, filled, framed, transfer
from pages import hash_of, space
from processes import exit_code
from servers import wait_until
from stores import Gate, HookedStorage, failing

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import (
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, frame, storage_calls
from hicache_storage.page_store import store as page_store
from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.page_store.lookup import PoolSpec
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.storage import Capabilities


@contextmanager
def interruptible() -> Generator[None, None, None]:
    """Let SIGINT raise KeyboardInterrupt, even if a shell started this process in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class TestSaveAndLoad:
    def test_a_saved_page_is_loaded(self, open_store: Callable[..., PageStore]) -> None:
        store = open_store()
        assert [[Verdict.OK] * 8] == store.save([transfer(filled())]).verdicts
        pages = empty()

        outcome = store.load([transfer(pages)])

        assert outcome.arrived() == 8
        assert [bytes_of(n + 1) for n in range(8)] == [page.tobytes() for page in pages]

    def test_a_missing_page_is_a_miss_and_no_other_page_is_touched(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        hashes = [hash_of(n) for n in (0, 1, 3)]
        store.save([transfer([framed(1), framed(2), framed(4)], hashes)])
        pages = empty(4)

        outcome = store.load([transfer(pages)])

        assert [[Verdict.OK, Verdict.OK, Verdict.MISS, Verdict.OK]] == outcome.verdicts
        assert outcome.arrived() == 2
        assert [1, 2, 0, 4] == [page.segments[0][0] for page in pages]

    def test_target_and_draft_of_one_hash_do_not_meet(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        store.save([transfer([framed(1)]), Transfer(DRAFT, HASHES[:1], [framed(2)])])
        target, draft = framed(0), framed(0)

        store.load([transfer([target]), Transfer(DRAFT, HASHES[:1], [draft])])

        assert (bytes_of(1), bytes_of(2)) == (target.tobytes(), draft.tobytes())

    def test_an_arrived_prefix_ends_at_the_first_page_missing_in_any_pool(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        store.save([transfer(filled(3)), Transfer(DRAFT, HASHES[:2], filled(2))])

        outcome = store.load([transfer(empty(3)), Transfer(DRAFT, HASHES[:3], empty(3))])

        assert outcome.arrived() == 2

    def test_a_refused_page_is_reported_and_the_others_are_stored(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(parallelism=1)
        storage.hooks["batch_set"] = lambda answer: [
            number != 1 and ok for number, ok in enumerate(answer())
        ]

        assert [[Verdict.OK, Verdict.REFUSED, Verdict.OK]] == store.save(
            [transfer(filled(3))]
        ).verdicts

    @pytest.mark.parametrize(
        ("claims", "settings"), [({"revocable": True}, {}), ({}, {"lend_memory": "always"})]
    )
    def test_a_store_that_is_lent_pages_gets_no_copy(
        self,
        open_store: Callable[..., PageStore],
        claims: dict[str, bool],
        settings: dict[str, str],
    ) -> None:
        """The storage gets a header of the page store, and each segment of the caller's page."""
        storage = HookedStorage(Capabilities(**claims))  # type: ignore[arg-type]
        seen: list[tuple[int, ...]] = []
        page = framed(7)
        store = open_store(storage, **settings)
        inner_set = storage.inner.batch_set

        def spy(key_space: Any, hashes: Any, pages: list[Page]) -> list[bool]:
            seen.extend(tuple(address for address, _ in each.addresses) for each in pages)
            return inner_set(key_space, hashes, pages)

        storage.inner.batch_set = spy  # type: ignore[method-assign,assignment]
        store.save([transfer([page])])

        ((header, *payload),) = seen
        assert [address for address, _ in page.addresses] == payload
        assert header not in payload

    def test_a_store_without_scatter_gather_gets_pages_of_one_segment(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        storage = HookedStorage(Capabilities(scatter_gather=False))
        store = open_store(storage)
        pages = empty(4)

        store.save([transfer(filled(4))])
        outcome = store.load([transfer(pages)])

        assert {1} == set(storage.segments)
        assert outcome.arrived() == 4
        assert [bytes_of(n + 1) for n in range(4)] == [page.tobytes() for page in pages]

    @pytest.mark.parametrize(
        "claims", [Capabilities(keeps_given=True), Capabilities(scatter_gather=False)]
    )
    def test_a_store_may_keep_the_copies_of_saved_pages(
        self, open_store: Callable[..., PageStore], claims: Capabilities
    ) -> None:
        store = open_store(HookedStorage(claims))
        pages, found = filled(2), empty(2)
        store.save([transfer(pages)])
        for page in pages:
            page.copy_from(bytes_of(9))

        assert store.load([transfer(found)]).arrived() == 2
        assert [bytes_of(1), bytes_of(2)] == [page.tobytes() for page in found]

    @pytest.mark.parametrize("digest", [None, xxhash.xxh3_64_intdigest(bytes_of(1))])
    def test_a_copy_for_the_store_has_the_digest_of_its_page(
        self,
        open_store: Callable[..., PageStore],
        monkeypatch: pytest.MonkeyPatch,
        digest: int | None,
    ) -> None:
        monkeypatch.setattr(frame, "payload_checksums", None)  # a second hash would fail
        store = open_store(HookedStorage(Capabilities(keeps_given=True)))
        (page,) = filled(1)
        page.digest = digest

        assert store.save([transfer([page])]).whole() == [True]
        monkeypatch.undo()
        assert store.load([transfer(empty(1))]).whole() == [True]

    def test_a_store_with_alignment_gets_an_aligned_header(self) -> None:
        with PageStore(HookedStorage(Capabilities(alignment=4096))) as store:
            assert store.frame_nbytes == 4096

    @pytest.mark.parametrize(
        ("made", "complaint"),
        [
            (lambda: Transfer(TARGET, HASHES[:2], [framed(1)]), "2 hashes but 1 pages"),
            (lambda: Transfer(TARGET, ["XYZ"], [framed(1)]), "lowercase hex"),
            (lambda: Transfer(TARGET, ["../../etc/passwd"], [framed(1)]), "lowercase hex"),
            (
                lambda: Transfer(space(page_nbytes=7), HASHES[:1], [framed(1)]),
                "pages of 7 bytes|not open",
            ),
            (lambda: transfer([Page(bytearray(5))]), "pages of 96 bytes, not 5"),
        ],
    )
    def test_a_transfer_that_does_not_fit_is_refused_before_the_storage_sees_it(
        self,
        storage: HookedStorage,
        open_store: Callable[..., PageStore],
        made: Callable[[], Transfer],
        complaint: str,
    ) -> None:
        store = open_store()

        for call in (store.load, store.save):
            with pytest.raises(ValueError, match=complaint):
                call([made()])

        assert not storage.batches


class TestProof:
    """KV-404, KV-403: a wrong page is a counted miss and is deleted, and the next save replaces it."""

    def damaged(
        self, storage: HookedStorage, store: PageStore, damage: Callable[[bytes], bytes]
    ) -> None:
        store.save([transfer([framed(1)])])
        (key_space,) = (known for known in storage.inner._spaces if known.pool == "kv")
        pages = storage.inner._spaces[key_space]
        pages[HASHES[0]] = memoryview(bytearray(damage(bytes(pages[HASHES[0]]))))

    @pytest.mark.parametrize("offset", [0, 5, 30, 50, 119, 127, 128, 200, 128 + NBYTES - 1])
    def test_a_flipped_bit_is_found_deleted_and_healed(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], offset: int
    ) -> None:
        store = open_store()

        def flip(data: bytes) -> bytes:
            return data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :]

        self.damaged(storage, store, flip)

        assert [[Verdict.CORRUPT]] == store.load([transfer([framed(0)])]).verdicts
        assert store.stats()["load_corrupt"] == 1
        assert store.stats()["wrong_pages_deleted"] == 1
        assert [[Verdict.MISS]] == store.load([transfer([framed(0)])]).verdicts
        store.save([transfer([framed(1)])])
        assert store.load([transfer([framed(0)])]).arrived() == 1

    @pytest.mark.parametrize("checksum", ["xxh3", "none"])
    def test_another_page_under_this_name_is_a_wrong_key(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], checksum: str
    ) -> None:
        store = open_store(checksum=checksum)
        store.save([transfer(filled(2))])
        (pages,) = (p for known, p in storage.inner._spaces.items() if known.pool == "kv")
        pages[HASHES[0]] = pages[HASHES[1]]

        outcome = store.load([transfer(empty(2))])

        assert [[Verdict.WRONG_KEY, Verdict.OK]] == outcome.verdicts

    def test_a_page_without_a_checksum_is_no_hit_for_who_insists_on_one(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        open_store(checksum="none").save([transfer([framed(1)])])

        outcome = open_store(checksum="xxh3").load([transfer([framed(0)])])

        assert [[Verdict.CORRUPT]] == outcome.verdicts

    def test_a_wrong_page_that_cannot_be_deleted_is_still_no_hit(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        self.damaged(storage, store, lambda data: data[:-1] + b"?")
        storage.hooks["batch_delete"] = failing(OSError("read-only"))

        assert [[Verdict.CORRUPT]] == store.load([transfer([framed(0)])]).verdicts
        assert "wrong_pages_deleted" not in store.stats()

    def test_a_delete_that_hangs_keeps_no_verdict_back_beyond_the_deadline(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        """Pages are checked before the delete, so only wrong pages miss."""
        store = open_store(timeout_s=20)
        store.save([transfer(filled(2))])
        (pages,) = (p for known, p in storage.inner._spaces.items() if known.pool == "kv")
        pages[HASHES[0]][-1:] = b"?"
        gate = Gate()
        storage.hooks["batch_delete"] = gate

        outcome = store.load([transfer(empty(2))], timeout_s=1)

        assert [[Verdict.CORRUPT, Verdict.OK]] == outcome.verdicts
        assert gate.entered.is_set()
        gate.open()

    def test_reads_that_take_all_the_time_are_no_failure_of_the_writes(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        """One page is wrong and another read hangs, so no time is left to delete the wrong page."""
        store = open_store(timeout_s=1.5, breaker_failures=1, parallelism=2)
        self.damaged(storage, store, lambda data: data[:-1] + b"?")
        store.save([Transfer(DRAFT, HASHES[:1], empty(1))])
        gate, get = Gate(), storage.batch_get

        def by_pool(known: KeySpace, hashes: list[str], pages: list[Page]) -> Any:
            hangs = known.pool == "draft"
            return gate(list) if hangs else get(known, hashes, pages)

        vars(storage)["batch_get"] = by_pool
        hanging = Transfer(DRAFT, HASHES[:1], empty(1))

        outcome = store.load([hanging, transfer([framed(0)])])

        assert [[Verdict.TIMEOUT], [Verdict.CORRUPT]] == outcome.verdicts
        assert (store.breaker.reads.state, store.breaker.writes.state) == ("open", "closed")
        gate.open()


class TestMatch:
    def test_the_prefix_is_what_every_pool_has(self, open_store: Callable[..., PageStore]) -> None:
        store = open_store()
        store.save([transfer(filled(6)), Transfer(DRAFT, HASHES[:4], filled(4))])

        match = store.match(HASHES, [PoolSpec(space=TARGET), PoolSpec(space=DRAFT)])

        assert match.pages == 4

    def test_a_later_pool_is_asked_only_for_what_the_earlier_ones_left(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        store.save([transfer(filled(3))])
        storage.batches.clear()

        store.match(HASHES, [PoolSpec(space=TARGET), PoolSpec(space=DRAFT)])

        assert [("batch_exists", 8), ("batch_exists", 3)] == storage.batches

    def test_parts_of_one_pool_are_asked_at_once_behind_the_first(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        """The first part is queried alone. After that, the other parts are queried at the same time."""
        storage = HookedStorage(Capabilities(parallelism=3))
        store = open_store(storage)
        tiles = [replace(TARGET, shard=Shard(layers=(n, n + 1))) for n in range(4)]
        for number, tile in enumerate(tiles):
            store.open_space(tile)
            store.save([Transfer(tile, HASHES[: 6 - number], filled(6 - number))])
        storage.batches.clear()
        meeting = threading.Barrier(3)
        first = threading.Semaphore(1)

        def together(answer: Callable[[], Any]) -> Any:
            if not first.acquire(blocking=False):
                meeting.wait(20)
            return answer()

        storage.hooks["batch_exists"] = together
        match = store.match(HASHES, [PoolSpec(space=tile) for tile in tiles])

        assert match.pages == 3
        assert [("batch_exists", 8), *[("batch_exists", 6)] * 3] == storage.batches

    def test_pages_of_the_caller_are_not_queried_and_count(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        """The caller has pages 0, 1 and 5, and the storage has pages 2 to 4."""
        store = open_store()
        store.save([transfer(filled(3), HASHES[2:5])])
        storage.batches.clear()

        held = [number in (0, 1, 5) for number in range(8)]
        match = store.match(HASHES, [PoolSpec(space=TARGET)], held=[held])

        assert match.pages == 6
        assert [("batch_exists", 5)] == storage.batches

    @pytest.mark.parametrize(
        ("error", "failure"),
        [
            (StorageUnavailable("gone"), Verdict.UNAVAILABLE),
            (StorageTimeout("slow"), Verdict.TIMEOUT),
            (ValueError("bug"), Verdict.ERROR),
        ],
    )
    def test_a_match_gives_the_reason_that_a_pool_could_not_be_queried(
        self,
        storage: HookedStorage,
        open_store: Callable[..., PageStore],
        error: Exception,
        failure: Verdict,
    ) -> None:
        store = open_store(breaker_failures=1)
        assert [None] == store.match(HASHES, [PoolSpec(space=TARGET)]).failures
        storage.hooks["batch_exists"] = failing(error)

        assert [failure] == store.match(HASHES, [PoolSpec(space=TARGET)]).failures
        assert [Verdict.BREAKER_OPEN] == store.match(HASHES, [PoolSpec(space=TARGET)]).failures

    @pytest.mark.parametrize("error", [StorageUnavailable("gone"), ValueError("bug")])
    def test_a_store_that_fails_has_nothing(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], error: Exception
    ) -> None:
        store = open_store()
        store.save([transfer(filled())])
        storage.hooks["batch_exists"] = failing(error)

        assert store.match(HASHES, [PoolSpec(space=TARGET)]).pages == 0
        assert store.stats()["match_failed"] == 1

    def test_a_prefix_of_no_pools_is_refused(self, open_store: Callable[..., PageStore]) -> None:
        with pytest.raises(ValueError, match="at least one pool"):
            open_store().match(HASHES, [])


def large_pages() -> list[Page]:
    """Return 24 empty pages of 1 MiB."""
    return [Page(bytearray(1 << 20)) for _ in range(24)]


class TestSplitting:
    def test_no_call_is_larger_than_the_store_takes(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        storage = HookedStorage(Capabilities(max_batch=3))
        store = open_store(storage)

        store.save([transfer(filled())])
        store.match(HASHES, [PoolSpec(space=TARGET)])
        outcome = store.load([transfer(empty())])

        assert outcome.arrived() == 8
        assert {3, 2} == {size for _, size in storage.batches}

    @pytest.mark.parametrize(("limit_pages", "sizes"), [(3, {3, 2}), (1, {1}), (0.5, {1})])
    def test_no_call_has_more_bytes_than_the_store_takes(
        self, open_store: Callable[..., PageStore], limit_pages: float, sizes: set[int]
    ) -> None:
        framed = open_store().framed(TARGET)
        limit = int(limit_pages * framed.stored_nbytes)
        storage = HookedStorage(Capabilities(max_batch_nbytes=limit))
        store = open_store(storage)

        store.save([transfer(filled())])
        outcome = store.load([transfer(empty())])

        assert outcome.arrived() == 8
        assert sizes == {size for _, size in storage.batches}

    def test_small_pages_are_not_spread_thin(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        open_store(parallelism=4).save([transfer(filled())])

        assert [("batch_set", 8)] == storage.batches

    def test_large_pages_are_spread_over_the_threads(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        """Four storage calls, one for each block, run at the same time."""
        large = space(page_nbytes=1 << 20)
        storage = HookedStorage(Capabilities(parallelism=4))
        meeting = threading.Barrier(4)

        def meet(answer: Callable[[], Any]) -> Any:
            meeting.wait(20)
            return answer()

        storage.hooks["batch_set"] = meet
        store = open_store(storage)
        store.open_space(large)
        pages = large_pages()
        hashes = [hash_of(number) for number in range(24)]

        assert [[Verdict.OK] * 24] == store.save([Transfer(large, hashes, pages)]).verdicts
        assert [("batch_set", 6)] * 4 == storage.batches

    def test_beside_other_calls_a_short_transfer_is_one_call(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        """Several calls would only wait for the same threads and for the interpreter lock."""
        large = space(page_nbytes=1 << 20)
        storage = HookedStorage(Capabilities(parallelism=4))
        inside, gate = threading.Semaphore(0), threading.Event()

        def held(answer: Callable[[], Any]) -> Any:
            inside.release()
            gate.wait(20)
            return answer()

        storage.hooks["batch_set"] = held
        store = open_store(storage, lend_memory="always")
        store.open_space(large)
        pages = large_pages()
        first, second = (
            Transfer(large, [hash_of(n) for n in some], pages)
            for some in (range(24), range(24, 48))
        )
        saving = threading.Thread(target=store.save, args=([first],))
        saving.start()
        for _ in range(4):
            assert inside.acquire(timeout=20)
        others = threading.Thread(target=store.save, args=([second],))
        others.start()
        writes = store._lanes.get().writes
        wait_until(lambda: writes._executor.waiting_count > 0)
        gate.set()
        saving.join(20)
        others.join(20)

        assert [("batch_set", 6)] * 4 + [("batch_set", 24)] == storage.batches

    def test_a_thread_that_is_done_takes_what_is_left(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        """One storage call hangs until all other calls are done, which do not queue behind it."""
        large = space(page_nbytes=16 << 20)
        storage = HookedStorage(Capabilities(parallelism=2))
        left = threading.Semaphore(0)
        first = threading.Lock()

        def stuck(answer: Callable[[], Any]) -> Any:
            if first.acquire(blocking=False):
                for _ in range(5):
                    assert left.acquire(timeout=20)
            else:
                left.release()
            return answer()

        storage.hooks["batch_set"] = stuck
        store = open_store(storage, checksum="none")
        store.open_space(large)
        pages = [Page(bytearray(16 << 20))] * 6
        hashes = [hash_of(number) for number in range(6)]

        assert [[Verdict.OK] * 6] == store.save([Transfer(large, hashes, pages)]).verdicts
        assert [("batch_set", 1)] * 6 == storage.batches

    def test_small_pages_of_a_slow_store_are_spread_once_it_is_known_to_be_slow(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        def slow(answer: Callable[[], Any]) -> Any:
            threading.Event().wait(0.3)
            return answer()

        storage.hooks["batch_set"] = slow
        store = open_store(parallelism=4)

        store.save([transfer(filled())])
        store.save([transfer(filled())])

        assert [("batch_set", 8), *[("batch_set", 2)] * 4] == storage.batches

    def test_reads_go_on_while_every_writer_is_busy(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(timeout_s=20)
        store.save([transfer(filled(1))])
        gate = Gate()
        storage.hooks["batch_set"] = gate
        writer = threading.Thread(target=lambda: store.save([transfer(filled())]))
        writer.start()
        assert gate.entered.wait(20)

        assert store.load([transfer([framed(0)])]).arrived() == 1

        gate.open()
        writer.join(20)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (StorageUnavailable("refused"), Verdict.UNAVAILABLE),
            (StorageTimeout("slow"), Verdict.TIMEOUT),
            (RuntimeError("bug"), Verdict.ERROR),
            (SystemExit(1), Verdict.ERROR),
        ],
    )
    def test_an_error_of_a_storage_becomes_a_verdict(
        self,
        storage: HookedStorage,
        open_store: Callable[..., PageStore],
        error: BaseException,
        verdict: Verdict,
    ) -> None:
        store = open_store()
        storage.hooks["batch_get"] = storage.hooks["batch_set"] = failing(error)

        assert [[verdict] * 2] == store.load([transfer(empty(2))]).verdicts
        assert [[verdict] * 2] == store.save([transfer(filled(2))]).verdicts
        assert store.stats()[f"load_{verdict.value}"] == 2

    @pytest.mark.parametrize(
        ("error", "verdict"),
        [
            (StorageUnavailable("refused"), Verdict.UNAVAILABLE),
            (StorageTimeout("slow"), Verdict.TIMEOUT),
        ],
    )
    def test_a_store_that_is_gone_is_asked_for_one_piece_only(
        self, open_store: Callable[..., PageStore], error: BaseException, verdict: Verdict
    ) -> None:
        storage = HookedStorage(Capabilities(max_batch=1))
        storage.hooks["batch_get"] = failing(error)

        assert [[verdict] * 8] == open_store(storage).load([transfer(empty())]).verdicts
        assert storage.calls["batch_get"] == 1

    def test_a_piece_that_fails_takes_no_other_with_it(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        storage = HookedStorage(Capabilities(max_batch=4))
        store = open_store(storage)
        store.save([transfer(filled())])
        bugs = iter([RuntimeError("bug")])

        def fail_once(answer: Callable[[], Any]) -> Any:
            for bug in bugs:
                raise bug
            return answer()

        storage.hooks["batch_get"] = fail_once

        verdicts = [Verdict.ERROR] * 4 + [Verdict.OK] * 4
        assert [verdicts] == store.load([transfer(empty())]).verdicts

    @pytest.mark.parametrize("answers", [[], [True], [True] * 3, True])
    def test_answers_of_the_wrong_length_are_not_used(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], answers: Any
    ) -> None:
        store = open_store()
        storage.hooks["batch_get"] = lambda _: answers

        assert [[Verdict.ERROR] * 2] == store.load([transfer(empty(2))]).verdicts

    @pytest.mark.parametrize("answer", [1, "yes", None])
    def test_only_a_real_true_is_a_hit(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], answer: Any
    ) -> None:
        store = open_store()
        store.save([transfer(filled(2))])
        storage.hooks["batch_get"] = lambda true_answer: [true_answer()[0], answer]

        assert [[Verdict.OK, Verdict.MISS]] == store.load([transfer(empty(2))]).verdicts

    def test_a_hit_without_a_read_is_not_used(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        """The memory of an earlier read of the page must not prove it: the page may be gone since."""
        store = open_store(parallelism=1)
        store.save([transfer(filled(1))])
        assert store.load([transfer(empty(1))]).arrived() == 1
        storage.hooks["batch_get"] = lambda _: [True]

        outcome = store.load([transfer(empty(1))])

        assert [[Verdict.CORRUPT]] == outcome.verdicts


class TestDeadline:
    def test_a_call_that_overruns_times_out(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        store.save([transfer(filled(2))])
        gate = Gate()
        storage.hooks["batch_get"] = gate

        outcome = store.load([transfer(empty(2))], timeout_s=0.5)

        assert [[Verdict.TIMEOUT] * 2] == outcome.verdicts
        gate.open()

    def test_a_block_that_had_not_begun_never_begins(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(parallelism=1)
        gate = Gate()
        storage.hooks["batch_set"] = gate
        store.save([transfer(filled(1))], timeout_s=0.5)

        second = store.save([transfer(filled(2), HASHES[4:6])], timeout_s=0.05)

        assert [[Verdict.TIMEOUT] * 2] == second.verdicts
        gate.open()
        store.close()  # it joins the threads
        assert storage.calls["batch_set"] == 1

    def test_opening_a_space_has_a_deadline(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate()

        def slow(_: object) -> None:
            gate(lambda: None)

        monkeypatch.setattr(storage, "open_space", slow)
        with PageStore(storage, PageStoreSettings(timeout_s=0.05)) as store:
            with pytest.raises(StorageTimeout, match=r"within 0\.05 s"):
                store.open_space(TARGET)
            gate.open()


class TestBreaker:
    def test_a_store_that_keeps_failing_is_left_alone_then_probed(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(breaker_failures=2, breaker_cooldown_s=1)
        storage.hooks["batch_set"] = failing(StorageUnavailable("down"))
        for _ in range(2):
            store.save([transfer(filled(1))])
        assert [[Verdict.BREAKER_OPEN]] == store.save([transfer(filled(1))]).verdicts
        assert store.delete(TARGET, HASHES) == 0
        assert {"batch_set": 2} == storage.calls

        storage.hooks.clear()
        while store.breaker.state != "half_open":
            pass

        assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts
        assert store.breaker.state == "closed"
        assert store.stats()["breaker_opened"] == store.stats()["write_breaker_opened"] == 1

    def test_a_caller_with_a_short_timeout_does_not_open_it(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        """Requests with short deadlines do not open the breaker for other requests."""
        store = open_store(breaker_failures=1, timeout_s=20)
        gate = Gate()
        storage.hooks["batch_get"] = storage.hooks["batch_exists"] = gate

        assert [[Verdict.TIMEOUT]] == store.load([transfer(empty(1))], timeout_s=0.01).verdicts
        store.match(HASHES, [PoolSpec(space=TARGET)], timeout_s=0.01)

        assert store.breaker.state == "closed"
        gate.open()

    def test_a_probe_that_is_interrupted_is_followed_by_another(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(breaker_failures=1, breaker_cooldown_s=0.05)
        storage.hooks["batch_set"] = failing(StorageUnavailable("down"))
        store.save([transfer(filled(1))])
        while store.breaker.state != "half_open":
            pass
        gate = Gate()

        def interrupting(answer: Callable[[], Any]) -> Any:
            main = threading.main_thread().ident or 0
            while sys._current_frames()[main].f_code.co_name != "wait":
                time.sleep(0.001)
            time.sleep(0.01)  # a signal before the wait would be seen only after it
            signal.pthread_kill(main, signal.SIGINT)
            return gate(answer)

        storage.hooks["batch_set"] = interrupting
        with interruptible(), pytest.raises(KeyboardInterrupt):
            store.save([transfer(filled(1))])
        gate.open()
        storage.hooks.clear()

        assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts

    def test_a_timeout_of_zero_is_not_replaced_by_that_of_the_settings(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(timeout_s=1000)
        gate = Gate()
        storage.hooks["batch_get"] = gate

        assert [[Verdict.TIMEOUT]] == store.load([transfer(empty(1))], timeout_s=0).verdicts
        gate.open()

    def test_misses_and_refusals_do_not_open_it(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(breaker_failures=1)
        storage.hooks["batch_set"] = lambda _: [False]

        store.save([transfer(filled(1))])
        store.load([transfer(empty(1))])

        assert store.breaker.state == "closed"

    def test_writes_that_overrun_turn_no_read_away(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(breaker_failures=3)
        store.save([transfer(filled(1))])
        storage.hooks["batch_set"] = storage.hooks["batch_delete"] = failing(StorageTimeout("slow"))
        for _ in range(3):
            store.save([transfer(filled(1), HASHES[1:2])])

        assert store.breaker.writes.state == store.breaker.state == "open"
        assert store.breaker.reads.state == "closed"
        assert [[Verdict.OK]] == store.load([transfer(empty(1))]).verdicts
        assert store.match(HASHES, [PoolSpec(space=TARGET)]).pages == 1

    def test_reads_that_fail_turn_no_write_away(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(breaker_failures=1)
        storage.hooks["batch_exists"] = failing(StorageUnavailable("down"))
        store.match(HASHES, [PoolSpec(space=TARGET)])

        assert ("open", "closed") == (store.breaker.reads.state, store.breaker.writes.state)
        assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts
        assert store.delete(TARGET, HASHES[:1]) == 1

    @pytest.mark.parametrize("failures", [1, 2])
    def test_an_empty_call_does_not_count(
        self, storage: HookedStorage, open_store: Callable[..., PageStore], failures: int
    ) -> None:
        """Earlier failures still count, and an open breaker stays open."""
        store = open_store(breaker_failures=2, breaker_cooldown_s=0.001)
        for _ in range(failures):
            store.breaker.record(succeeded=False)

        for call in (store.load, store.save):
            assert call([]).arrived() == 0
            assert call([transfer([])]).arrived() == 0
        assert store.match([], [PoolSpec(space=TARGET)]).pages == 0
        assert store.match(HASHES, [PoolSpec(space=TARGET)], held=[[True] * 8]).pages == 8
        assert store.present(TARGET, []) == []
        assert store.delete(TARGET, []) == 0

        assert not storage.calls
        store.breaker.record(succeeded=False)
        assert store.breaker.state != "closed"


class TestOpening:
    def test_a_space_larger_than_the_store_takes_is_refused(self) -> None:
        storage = HookedStorage(Capabilities(max_page_nbytes=NBYTES + FRAME_NBYTES - 1))
        with PageStore(storage) as store, pytest.raises(UnsupportedOperation, match="smaller"):
            store.open_space(TARGET)

    def test_a_space_at_the_limit_is_taken(self) -> None:
        storage = HookedStorage(Capabilities(max_page_nbytes=NBYTES + FRAME_NBYTES))
        with PageStore(storage) as store:
            store.open_space(TARGET)
            assert store.save([transfer([framed(1)])]).arrived() == 1

    @pytest.mark.parametrize(
        ("field", "value"),
        [("checksum", "md5"), ("timeout_s", 0), ("parallelism", 0), ("breaker_failures", -1)],
    )
    def test_wrong_settings_are_refused(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=field):
            PageStoreSettings(**{field: value})

    def test_closing_ends_its_threads(self, storage: HookedStorage) -> None:
        before = set(threading.enumerate())
        store = PageStore(storage)
        assert set(threading.enumerate()) - before

        store.close()
        store.close()

        assert not set(threading.enumerate()) - before

    def test_the_error_of_the_storage_that_did_not_open_a_space_is_kept(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(_: Any) -> None:
            raise StorageTimeout("redis at 127.0.0.1:1 did not answer within 2 s")

        monkeypatch.setattr(storage, "open_space", late)
        with PageStore(storage) as store, pytest.raises(StorageTimeout, match="within 2 s"):
            store.open_space(TARGET)

    def test_a_space_that_is_opened_at_the_last_moment_is_open(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The answer may come as the wait ends: it is used, or the message names the deadline."""

        def passed(_: Deadline) -> float:
            return 0.0

        monkeypatch.setattr(Deadline, "remaining_s", passed)
        with PageStore(storage) as store:
            for number in range(200):
                tried = replace(TARGET, pool=f"pool-{number}")
                try:
                    store.open_space(tried)
                except StorageTimeout as error:
                    assert "did not open a key space within 10" in str(error)  # noqa: PT017
                else:
                    assert store.framed(tried).pool == tried.pool

    def test_a_closed_store_ends_waiting_calls(self, open_store: Callable[..., PageStore]) -> None:
        store = open_store(timeout_s=1000)
        store.close()

        assert [[Verdict.ERROR]] == store.save([transfer(filled(1))]).verdicts
        assert [Verdict.ERROR] == store.match(HASHES, [PoolSpec(space=TARGET)]).failures
        with pytest.raises(StorageClosed):
            store.open_space(DRAFT)

    def test_idle_threads_are_not_reported_as_in_a_call(
        self,
        open_store: Callable[..., PageStore],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(storage_calls, "_MIN_CLOSE_S", 20.0, raising=False)
        for _ in range(10):
            open_store().close(timeout_s=0)

        assert not [one for one in caplog.messages if "left behind" in one]


class TestFork:
    """KV-306: threads stay in the parent, and a forked child starts its own."""

    def test_a_forked_child_works_with_threads_breakers_and_counters_of_its_own(
        self,
        storage: HookedStorage,
        open_store: Callable[..., PageStore],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(storage.inner, "usable_after_fork", True)  # no other thread uses it
        store = open_store(breaker_failures=1, timeout_s=50)
        store.save([transfer(filled(2))])
        store.breaker.record(succeeded=False)
        assert [[Verdict.BREAKER_OPEN]] == store.load([transfer(empty(1))]).verdicts
        reads = store._lanes.get().reads
        with reads._executor._changed, reads.guard._lock:  # as a thread of the parent may hold them
            child = os.fork()
            if child == 0:
                os._exit(0 if self.works(store) else 1)

        assert exit_code(child) == 0
        assert [[Verdict.BREAKER_OPEN]] == store.load([transfer(empty(1))]).verdicts

    def works(self, store: PageStore) -> bool:
        try:
            pages = empty(2)
            return (
                store.match(HASHES, [PoolSpec(space=TARGET)]).pages == 2
                and store.load([transfer(pages)]).arrived() == 2
                and [bytes_of(n + 1) for n in range(2)] == [p.tobytes() for p in pages]
                and store.save([transfer(filled(3))]).arrived() == 3
                and store.delete(TARGET, HASHES[2:3]) == 1
                and store.stats()["load_ok"] == 2
                and store.stats()["breaker_opened"] == 0
                and not self.works_when_closed(store)
            )
        except BaseException:  # noqa: BLE001 - pytest must not continue in the child
            return False

    def works_when_closed(self, store: PageStore) -> bool:
        store.close()
        return store.match(HASHES, [PoolSpec(space=TARGET)]).pages > 0

    def test_a_store_that_was_closed_before_the_fork_is_closed_in_the_child(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store(timeout_s=50)
        store.close()

        child = os.fork()
        if child == 0:
            verdicts = store.save([transfer(filled(1))]).verdicts
            os._exit(0 if verdicts == [[Verdict.ERROR]] else 1)

        assert exit_code(child) == 0


class TestDelete:
    def test_deleted_pages_are_misses_and_the_others_are_not(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        store = open_store()
        store.save([transfer(filled())])

        assert store.delete(TARGET, HASHES[2:4]) == 2

        assert [True, True, False, False, True, True, True, True] == [
            verdict is Verdict.OK for verdict in store.load([transfer(empty())]).verdicts[0]
        ]

    def test_a_delete_waits_no_longer_than_its_caller(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        gate = Gate()
        storage.hooks["batch_delete"] = gate
        store = open_store(timeout_s=1000)

        assert store.delete(TARGET, HASHES, timeout_s=0.05) == 0

        gate.open()

    def test_absent_pages_count_as_deleted(self, open_store: Callable[..., PageStore]) -> None:
        assert open_store().delete(DRAFT, HASHES) == len(HASHES)

    def test_batches_are_no_larger_than_the_store_takes(
        self, open_store: Callable[..., PageStore]
    ) -> None:
        storage = HookedStorage(Capabilities(max_batch=3))

        open_store(storage).delete(TARGET, HASHES)

        assert [3, 3, 2] == [pages for name, pages in storage.batches if name == "batch_delete"]

    def test_a_failing_store_is_counted_and_raises_nothing(
        self, storage: HookedStorage, open_store: Callable[..., PageStore]
    ) -> None:
        storage.hooks["batch_delete"] = failing(StorageUnavailable("gone"))
        store = open_store(breaker_failures=1)

        assert store.delete(TARGET, HASHES) == 0
        assert store.breaker.state == "open"
        assert store.delete(TARGET, HASHES) == 0
        assert storage.calls["batch_delete"] == 1


class TestSpaceThatIsNotOpen:
    def test_reads_miss_and_do_not_open_it(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[KeySpace] = []
        monkeypatch.setattr(storage, "open_space", opened.append)
        with PageStore(storage) as store:
            assert [False] == store.present(TARGET, HASHES[:1])
            assert 0 == store.match(HASHES, [PoolSpec(space=TARGET)]).pages
            assert [[Verdict.MISS]] == store.load([transfer(empty(1))]).verdicts
            assert 1 == store.delete(TARGET, HASHES[:1])

        assert [] == opened

    def test_reads_of_pages_larger_than_the_store_takes_are_refused(self) -> None:
        storage = HookedStorage(Capabilities(max_page_nbytes=NBYTES + FRAME_NBYTES - 1))
        with PageStore(storage) as store, pytest.raises(UnsupportedOperation, match="smaller"):
            store.present(TARGET, HASHES[:1])

        assert not storage.calls

    def test_a_save_opens_it(self, storage: HookedStorage) -> None:
        with PageStore(storage) as store:
            assert 1 == store.save([transfer(filled(1))]).arrived()
            assert store.has_space(TARGET)

    def test_those_that_strangers_name_are_forgotten(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page_store, "_MOST_FRAMED", 2)
        with PageStore(storage) as store:
            first, *_, last = (store.framed(replace(TARGET, tenant=f"{n}")) for n in range(4))

            assert last is store.framed(replace(TARGET, tenant="3"))
            assert first is not store.framed(replace(TARGET, tenant="0"))

    def test_one_that_has_a_frame_is_refused(self, open_store: Callable[..., PageStore]) -> None:
        with pytest.raises(ValueError, match="the page store adds it"):
            open_store().present(open_store().framed(TARGET), HASHES[:1])
