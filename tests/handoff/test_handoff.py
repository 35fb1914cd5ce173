"""Both sides of a hand-off in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from handoff_sides import (
    CONTROLLER,
    HALF,
    HASTY,
    KINDS,
    PATIENT,
    PROMPT,
    WINDOW_PAGES,
    compute,
    engine_rank,
    is_right,
    receiving,
    sending,
    stored_pages,
)
from hicache_backends.memory import MemoryStorage
from hicache_conformance import Fault, FaultyStorage, Odds
from pages import hash_of, page
from servers import wait_until
from stores import Gate, HookedStorage, failing

from hicache_storage.controller import (
    Channel,
    ControllerSettings,
    Coverage,
    PartialHits,
    PrefetchPolicy,
    RanksLost,
    SingleRank,
    WritePolicy,
)
from hicache_storage.errors import StorageClosed, StorageUnavailable
from hicache_storage.handoff import (
    Completion,
    CompletionStore,
    HandoffReceiver,
    HandoffRequest,
    HandoffSender,
    HandoffSettings,
)
from hicache_storage.handoff.completion import completion_hash
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore


class _KeepsTheFirst(MemoryStorage):
    """A storage that never overwrites a page."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        there = self.batch_exists(space, hashes)
        return [
            present or super(_KeepsTheFirst, self).batch_set(space, [page_hash], [each])[0]
            for present, page_hash, each in zip(there, hashes, pages, strict=True)
        ]


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    with MemoryStorage() as opened:
        yield opened


def prefilled(storage: MemoryStorage, kind: str = "mla-mha", size: int = 1) -> None:
    """Run a prefill engine. Every rank computes, publishes and ends."""
    for rank in range(size):
        with (
            engine_rank(storage, kind=kind, rank=rank, size=size) as (controller, store),
            HandoffSender(controller, store, PATIENT) as sender,
        ):
            compute(controller, PROMPT)
            assert sender.publish("request-1", PROMPT).result(30) == len(PROMPT)


def taken(request: HandoffRequest) -> int:
    """Take the result of a request. Return its number of pages, after checking their content."""
    with request.result() as lease:
        assert is_right(lease)
        return lease.pages


class TestCompletions:
    @pytest.mark.parametrize("kind", KINDS)
    def test_one_for_a_replicated_pool_and_one_a_writer_for_a_sharded(
        self, storage: MemoryStorage, kind: str
    ) -> None:
        prefilled(storage, kind, size=2)

        expected = sum({"mla": 1, "mha": 2}[attention] for attention in kind.split("-"))
        assert stored_pages(storage)["handoff"] == expected

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_decode_rank_takes_its_own_shards(self, storage: MemoryStorage, kind: str) -> None:
        prefilled(storage, kind, size=2)

        with (
            receiving(storage, kind=kind, rank=0, size=2) as first,
            receiving(storage, kind=kind, rank=1, size=2) as second,
        ):
            both = [side.expect("request-1", PROMPT) for side in (first, second)]
            wait_until(lambda: not any(request.missing for request in both))
            assert [len(PROMPT)] * 2 == [taken(request) for request in both]

    def test_it_is_ready_only_with_all_of_them(self, storage: MemoryStorage) -> None:
        with (
            receiving(storage, kind="mha-mha", rank=0, size=2) as receiver,
            sending(storage, kind="mha-mha", rank=1, size=2) as other_rank,
        ):
            request = receiver.expect("request-1", PROMPT)
            assert other_rank.publish("request-1", PROMPT).result(30) == 0

            assert len(request.missing) == len(request.awaited) == 2
            assert not request.poll()
            request.cancel()

    def test_another_requests_are_not_taken_for_it(self, storage: MemoryStorage) -> None:
        prefilled(storage)

        with receiving(storage, handoff=HASTY) as receiver:
            request = receiver.expect("request-2", PROMPT)
            taken(request)

            assert len(request.missing) == 2
            assert receiver.stats()["timed_out_requests"] == 1

    def test_they_arrive_whatever_comes_first(self, storage: MemoryStorage) -> None:
        with receiving(storage) as receiver:
            request = receiver.expect("request-1", PROMPT)
            prefilled(storage)

            assert taken(request) == len(PROMPT)
            assert receiver.stats()["complete_requests"] == 1

    def test_pages_that_came_early_count_as_loaded(self, storage: MemoryStorage) -> None:
        with engine_rank(storage) as (controller, store):
            compute(controller, PROMPT[:HALF])
            assert controller.drain(20)
            with (
                receiving(storage) as receiver,
                HandoffSender(controller, store, PATIENT) as sender,
            ):
                request = receiver.expect("request-1", PROMPT)
                wait_until(lambda: request._prefetch.complete)
                compute(controller, PROMPT[HALF:])
                sender.publish("request-1", PROMPT)
                with request.result() as lease:
                    assert lease.loaded == list(range(len(PROMPT)))
                    assert is_right(lease)

    def test_early_looks_are_no_requests_and_no_uses(self, storage: MemoryStorage) -> None:
        """Every completion that arrives starts another prefetch, but only the last one counts."""
        with (
            engine_rank(storage) as (decode, store),
            HandoffReceiver(decode, store, PATIENT) as receiver,
        ):
            prefilled(storage)
            request = receiver.expect("request-1", PROMPT)
            wait_until(lambda: not request.missing)
            while not request.poll():
                wait_until(lambda: request._prefetch.complete)
            with request.result() as lease:
                assert {2} == {entry.uses for entry in lease.entries}  # it came, and it is used

            counted = decode.stats()
            assert (1, len(PROMPT)) == (counted["requests"], counted["l3_hit_pages"])
            assert ("l2_hit_pages" in counted, "missed_pages" in counted) == (False, False)
            assert decode.explain("request-1").l3_pages == len(PROMPT)

    def test_a_prompt_of_no_full_page_needs_none(self, storage: MemoryStorage) -> None:
        with receiving(storage) as receiver, sending(storage) as sender:
            assert sender.publish("request-1", []).result(10) == 0
            assert taken(receiver.expect("request-1", [])) == 0


def _raise(*_: object, **__: object) -> None:
    raise ValueError("no save")


class TestPrefillSide:
    def test_a_failed_publish_is_logged_and_pins_nothing(
        self,
        storage: MemoryStorage,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The sender's page store raises, and the caller ignores the future."""
        with (
            engine_rank(storage) as (controller, _),
            PageStore(HookedStorage()) as other,
            HandoffSender(controller, other, PATIENT) as sender,
        ):
            compute(controller, PROMPT)
            assert controller.drain(20)

            monkeypatch.setattr(other, "save", _raise)
            published = sender.publish("request-1", PROMPT)

            assert isinstance(published.exception(20), ValueError)
            wait_until(lambda: "request 'request-1' was not published" in caplog.text)
            assert controller.cache.clear() == 0

    @pytest.mark.parametrize("policy", WritePolicy, ids=lambda policy: policy.value)
    def test_pages_are_written_whatever_the_write_policy(
        self, storage: MemoryStorage, policy: WritePolicy
    ) -> None:
        settings = ControllerSettings(write_policy=policy)
        with engine_rank(storage, settings=settings) as (controller, store):
            compute(controller, PROMPT)
            with HandoffSender(controller, store, PATIENT) as sender:
                assert sender.publish("request-1", PROMPT).result(30) == len(PROMPT)
            assert stored_pages(storage) == {"kv": 24, "draft": 24, "handoff": 2}

    def test_pages_that_storage_lost_are_written_again(self, storage: MemoryStorage) -> None:
        with engine_rank(storage) as (controller, store):
            compute(controller, PROMPT)
            assert controller.drain(20)
            for pool in controller.cache.pools:
                store.delete(pool.space, PROMPT[3:5])
            with HandoffSender(controller, store, PATIENT) as sender:
                assert sender.publish("request-1", PROMPT).result(30) == len(PROMPT)

    def test_pages_that_cannot_be_written_are_left_out(self, storage: MemoryStorage) -> None:
        """The request was aborted after half of the prompt was computed."""
        with (
            engine_rank(storage) as (controller, store),
            HandoffSender(controller, store, PATIENT) as sender,
            receiving(storage) as receiver,
        ):
            request = receiver.expect("request-1", PROMPT)
            compute(controller, PROMPT[:HALF])

            assert sender.publish("request-1", PROMPT).result(30) == HALF
            assert taken(request) == HALF
            assert [HALF, HALF] == [each.pages for each in request.completions]
            assert sender.stats() == {"published_in_part": 1}

    @pytest.mark.parametrize("storage_class", [MemoryStorage, _KeepsTheFirst])
    def test_a_second_attempt_replaces_the_first(self, storage_class: type[MemoryStorage]) -> None:
        storage = storage_class()
        with (
            engine_rank(storage) as (controller, store),
            HandoffSender(controller, store, PATIENT) as sender,
        ):
            compute(controller, PROMPT[:HALF])
            sender.publish("request-1", PROMPT).result(30)
            compute(controller, PROMPT[HALF:])
            sender.publish("request-1", PROMPT).result(30)

            with receiving(storage) as receiver:
                request = receiver.expect("request-1", PROMPT)
                assert taken(request) == len(PROMPT)
                assert {len(PROMPT)} == {each.pages for each in request.completions}


class TestPools:
    def test_pipeline_stages_hand_over_their_layers(self, storage: MemoryStorage) -> None:
        """The first of two stages has one layer of the target, the second two layers and the draft."""
        for rank in range(2):
            with (
                engine_rank(storage, rank=rank, stages=2, by_layers=True) as (controller, store),
                HandoffSender(controller, store, PATIENT) as sender,
            ):
                compute(controller, PROMPT)
                assert sender.publish("request-1", PROMPT).result(30) == len(PROMPT)

        with receiving(storage, by_layers=True) as receiver:
            request = receiver.expect("request-1", PROMPT)
            wait_until(lambda: not request.missing)
            layers = sorted(each.shard.layers for each in request.completions)
            assert layers == [(0, 1), (0, 1), (1, 2), (2, 3)]
            assert taken(request) == len(PROMPT)

    def test_a_target_without_its_draft_is_taken_where_that_is_wanted(
        self, storage: MemoryStorage
    ) -> None:
        """The prefill engine has no draft model, and the decode engine accepts the target alone."""
        with (
            engine_rank(storage) as (controller, store),
            HandoffSender(controller, store, PATIENT) as sender,
        ):
            compute(controller, PROMPT, without=["draft"])
            assert sender.publish("request-1", PROMPT).result(30) == 0

        settings = replace(CONTROLLER, partial_hits=PartialHits.TAKE_TARGET)
        with receiving(storage, settings=settings) as receiver:
            request = receiver.expect("request-1", PROMPT)
            with request.result() as lease:
                assert lease.pages == len(PROMPT)
                assert lease.verdict is Coverage.TARGET_ONLY
                assert is_right(lease)
            assert {0, len(PROMPT)} == {each.pages for each in request.completions}

    def test_the_window_of_a_trailing_pool_is_handed_over(self, storage: MemoryStorage) -> None:
        prefilled(storage, "mla-swa")
        assert stored_pages(storage) == {"kv": 24, "draft": WINDOW_PAGES, "handoff": 2}

        with receiving(storage, kind="mla-swa") as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == len(PROMPT)


class TestTimeout:
    def test_pages_that_came_after_the_last_lookup_are_taken(self, storage: MemoryStorage) -> None:
        rarely = HandoffSettings(timeout_s=500, load_every_s=500, grace_s=30)
        with (
            engine_rank(storage) as (controller, _),
            receiving(storage, handoff=rarely) as receiver,
        ):
            request = receiver.expect("request-1", PROMPT)
            wait_until(lambda: request._prefetch.complete)
            compute(controller, PROMPT)
            assert controller.drain(20)
            assert not request.poll()

            request.expire()

            assert taken(request) == len(PROMPT)

    def test_pages_that_are_there_are_taken(self, storage: MemoryStorage) -> None:
        with engine_rank(storage) as (controller, _):
            compute(controller, PROMPT[:HALF])
            assert controller.drain(20)

        with receiving(storage, handoff=HASTY) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == HALF

    def test_nothing_is_no_error(self, storage: MemoryStorage) -> None:
        with receiving(storage, handoff=HASTY) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == 0

    def test_a_request_may_have_its_own(self, storage: MemoryStorage) -> None:
        with receiving(storage, handoff=HandoffSettings(timeout_s=500)) as receiver:
            assert taken(receiver.expect("request-1", PROMPT, timeout_s=0.05)) == 0

    def test_it_is_shorter_than_a_hanging_store(self) -> None:
        """The engine's thread waits for the timeout, never for a call of the storage."""
        storage, gate = HookedStorage(), Gate()
        with receiving(storage, handoff=replace(HASTY, grace_s=0.3)) as receiver:
            storage.hooks["batch_exists"] = gate
            assert taken(receiver.expect("request-1", PROMPT)) == 0
            assert gate.entered.is_set()
            gate.open()


class TestCleanup:
    @pytest.mark.parametrize("delete_pages", [False, True])
    def test_completions_go_and_pages_by_option(
        self, storage: MemoryStorage, *, delete_pages: bool
    ) -> None:
        prefilled(storage)
        assert stored_pages(storage) == {"kv": 24, "draft": 24, "handoff": 2}
        settings = replace(PATIENT, delete_pages=delete_pages)

        with receiving(storage, handoff=settings) as receiver:
            taken(receiver.expect("request-1", PROMPT))

        assert stored_pages(storage) == ({} if delete_pages else {"kv": 24, "draft": 24})

    @pytest.mark.parametrize("delete_pages", [False, True])
    def test_a_request_that_is_cancelled_here_is_whole_on_another_engine(
        self, storage: MemoryStorage, *, delete_pages: bool
    ) -> None:
        """The request moves to another engine, which finds its completions and pages."""
        prefilled(storage)
        settings = replace(PATIENT, timeout_s=500, delete_pages=delete_pages)

        with receiving(storage, handoff=settings) as receiver:
            request = receiver.expect("request-1", PROMPT)
            wait_until(lambda: not request.missing)
            request.cancel()
            request.cancel()
            assert request.poll()
            assert receiver.stats()["cancelled_requests"] == 1
        assert stored_pages(storage) == {"kv": 24, "draft": 24, "handoff": 2}

        with receiving(storage, handoff=settings) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == len(PROMPT)
            assert receiver.stats()["complete_requests"] == 1

    def test_completions_that_were_not_seen_stay(self, storage: MemoryStorage) -> None:
        """Another decode engine may await completions that arrive after this engine has given up."""
        with (
            receiving(storage, kind="mha-mha", rank=0, size=2, handoff=HASTY) as receiver,
            sending(storage, kind="mha-mha", rank=0, size=2) as sender,
        ):
            request = receiver.expect("request-1", PROMPT)
            wait_until(request.poll)
            sender.publish("request-1", PROMPT).result(30)
            request._completions.clear()
            taken(request)
        assert stored_pages(storage)["handoff"] == 2

    def test_completions_may_be_deleted_already(self, storage: MemoryStorage) -> None:
        prefilled(storage)
        settings = replace(PATIENT, delete_pages=True)

        with receiving(storage, handoff=settings) as receiver:
            request = receiver.expect("request-1", PROMPT)
            wait_until(request.poll)
            for key_space in storage.spaces():
                storage.clear(key_space)
            assert taken(request) == len(PROMPT)

        assert stored_pages(storage) == {}

    def test_every_slot_comes_back(self, storage: MemoryStorage) -> None:
        prefilled(storage)

        with receiving(storage) as receiver:
            taken(receiver.expect("request-1", PROMPT))
            cache = receiver._controller.cache
            assert cache.clear() == 0
            assert [64, 64] == [pool.host.free_slots for pool in cache.pools]


def test_a_completion_that_an_earlier_one_keeps_out_is_not_posted() -> None:
    """The store never overwrites a page, and its deletes fail for a while."""

    class Keeping(_KeepsTheFirst):
        capabilities = replace(MemoryStorage.capabilities, overwrites=False)
        deletes = True

        def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
            return super().batch_delete(space, hashes) if self.deletes else [False] * len(hashes)

    with Keeping() as storage, engine_rank(storage) as (controller, store):
        key_space = controller.cache.pools[0].space
        board = CompletionStore(store, key_space, stale_after_s=600)
        key = completion_hash("request-1", key_space, PROMPT)
        now_s = time.time()
        first, second = (
            Completion.of("request-1", key_space, PROMPT, pages, now_s) for pages in (1, 2)
        )
        assert board.post({key: first}) == []
        storage.deletes = False

        assert board.post({key: second}) == [key]
        assert board.read([key]) == {key: first}
        storage.deletes = True

        assert board.post({key: second}) == []
        assert board.read([key]) == {key: second}


class TestStaleCompletions:
    @pytest.fixture(params=[-1000, 1000], ids=["long ago", "in the future"])
    def stale(self, storage: MemoryStorage, request: pytest.FixtureRequest) -> MemoryStorage:
        """Return a storage with the completions of a request whose engines have ended."""
        with engine_rank(storage) as (controller, store):
            pools = [pool.space for pool in controller.cache.pools]
            board = CompletionStore(store, pools[0], stale_after_s=600)
            then_s = time.time() + request.param
            completions = {
                completion_hash("request-1", key_space, PROMPT): Completion.of(
                    "request-1", key_space, PROMPT, len(PROMPT), then_s
                )
                for key_space in pools
            }
            assert board.post(completions) == []
        return storage

    def test_stale_completions_are_swept_by_the_next_receiver(self, stale: MemoryStorage) -> None:
        with receiving(stale):
            wait_until(lambda: stored_pages(stale) == {})

    def test_stale_completions_are_ignored(self, stale: MemoryStorage) -> None:
        with receiving(stale, handoff=HASTY) as receiver:
            request = receiver.expect("request-1", PROMPT)
            assert taken(request) == 0
            assert request.completions == []

    def test_fresh_ones_of_others_stay(self, storage: MemoryStorage) -> None:
        prefilled(storage)

        with receiving(storage) as receiver:
            assert receiver._completions.sweep() == 2


class TestFailingStore:
    @pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
    def test_no_fault_hands_over_a_wrong_byte(self, storage: MemoryStorage, fault: Fault) -> None:
        """A fifth of the calls of each operation fail, on both sides."""
        spec = [Odds(f"batch_{name}", fault, 0.2) for name in ("exists", "get", "set", "delete")]
        faulty = FaultyStorage(storage, spec, seed=5, delay_s=0.01, hang_s=0.05)
        with (
            engine_rank(faulty) as (controller, store),
            HandoffSender(controller, store, HASTY) as sender,
            receiving(faulty, handoff=HASTY) as receiver,
        ):
            for turn in range(4):
                prompt = [hash_of(100 * turn + number) for number in range(8)]
                request = receiver.expect(f"request-{turn}", prompt)
                compute(controller, prompt)
                sender.publish(f"request-{turn}", prompt)
                with request.result() as lease:
                    assert is_right(lease, prompt)
        assert faulty.struck

    def test_a_damaged_completion_is_none(self, storage: MemoryStorage) -> None:
        prefilled(storage)
        for key_space in storage.spaces():
            if key_space.pool == "handoff":
                hashes = [info.page_hash for info in storage.scan(key_space)]
                noise = [page(key_space.stored_nbytes, seed) for seed in range(len(hashes))]
                assert all(storage.batch_set(key_space, hashes, noise))

        with receiving(storage, handoff=HASTY) as receiver:
            request = receiver.expect("request-1", PROMPT)
            assert taken(request) == len(PROMPT)
            assert request.completions == []
        assert "handoff" not in stored_pages(storage)

    def test_completions_that_are_not_taken_make_the_request_unpublished(self) -> None:
        storage = HookedStorage()
        with (
            engine_rank(storage) as (controller, store),
            HandoffSender(controller, store, HASTY) as sender,
        ):
            compute(controller, PROMPT)
            assert controller.drain(20)
            storage.hooks["batch_set"] = lambda answer: [False] * len(answer())
            assert sender.publish("request-1", PROMPT).result(30) == 0
            assert sender.stats()["unpublished"] == 1

    @pytest.mark.parametrize("operation", ["batch_exists", "batch_get", "batch_delete"])
    def test_a_store_that_raises_costs_the_pages_and_nothing_else(self, operation: str) -> None:
        storage = HookedStorage()
        storage.hooks[operation] = failing(StorageUnavailable("gone"))
        with receiving(storage, handoff=HASTY) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == 0

    def test_a_store_that_cannot_list_is_not_swept(self) -> None:
        with receiving(HookedStorage()) as receiver:
            assert receiver._completions.sweep() == 0


class _OtherRankIsLost(SingleRank):
    """The ranks of an engine of two ranks, one of which has died."""

    size = 2

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        raise RanksLost(f"rank 1 has gone: nothing can be agreed on {channel} about {values}")


class TestRanks:
    def test_a_request_is_computed_where_the_ranks_are_lost(self, storage: MemoryStorage) -> None:
        prefilled(storage, "mla-mla")

        with receiving(storage, kind="mla-mla", ranks=_OtherRankIsLost()) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == 0


class TestLife:
    def test_closing_ends_waiting_requests(self, storage: MemoryStorage) -> None:
        with engine_rank(storage) as (_, _), receiving(storage) as receiver:
            request = receiver.expect("request-1", PROMPT)
            assert receiver.close()
            assert taken(request) == 0

    def test_a_closed_receiver_takes_no_request(self, storage: MemoryStorage) -> None:
        with receiving(storage) as receiver:
            receiver.close()
            with pytest.raises(StorageClosed):
                receiver.expect("request-1", PROMPT)

    def test_a_closed_sender_publishes_nothing(self, storage: MemoryStorage) -> None:
        with engine_rank(storage) as (controller, store):
            sender = HandoffSender(controller, store, PATIENT)
            sender.close()

            assert isinstance(sender.publish("request-1", PROMPT).exception(5), StorageClosed)

    def test_a_result_is_taken_once(self, storage: MemoryStorage) -> None:
        prefilled(storage)
        with receiving(storage) as receiver:
            request = receiver.expect("request-1", PROMPT)
            taken(request)
            with pytest.raises(RuntimeError, match="request-1"):
                request.result()

    def test_many_requests_share_one_lookup_thread(self, storage: MemoryStorage) -> None:
        prompts = {f"request-{n}": [*PROMPT[:4], hash_of(1000 + n)] for n in range(6)}
        with (
            engine_rank(storage) as (controller, store),
            HandoffSender(controller, store, PATIENT) as sender,
            receiving(storage) as receiver,
        ):
            waiting = {name: receiver.expect(name, prompt) for name, prompt in prompts.items()}
            for name, prompt in prompts.items():
                compute(controller, prompt)
                sender.publish(name, prompt)
            for name, request in waiting.items():
                with request.result() as lease:
                    assert lease.pages == 5
                    assert is_right(lease, prompts[name])

    def test_best_effort_prefetches_are_waited_for(self, storage: MemoryStorage) -> None:
        """An engine whose prefetches do not wait for L3 does wait for it in a hand-off."""
        prefilled(storage)
        settings = ControllerSettings(
            prefetch_policy=PrefetchPolicy.BEST_EFFORT, prefetch_threshold_tokens=0
        )
        with receiving(storage, settings=settings) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == len(PROMPT)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("timeout_s", 0), ("poll_min_s", -1), ("poll_max_s", 0.001), ("stale_after_s", 1)],
    )
    def test_settings_that_cannot_work_are_refused(self, field: str, value: float) -> None:
        with pytest.raises(ValueError, match=field):
            replace(HandoffSettings(), **{field: value})  # type: ignore[arg-type] # by name
