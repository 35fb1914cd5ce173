from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from composed_stores import Controlled
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.composition.member import Member
from hicache_storage.composition.settings import LimitSettings
from hicache_storage.errors import StorageClosed, StorageTimeout, StorageUnavailable

SPACE = space()
A, B = hash_of(1), hash_of(2)


@pytest.fixture
def store() -> Controlled:
    return Controlled()


@pytest.fixture
def limit_s() -> float:
    """Return the time limit of the member. Tests in which a store hangs have a short one."""
    return 60


@pytest.fixture
def member(store: Controlled, limit_s: float) -> Iterator[Member]:
    limits = LimitSettings(timeout_s=limit_s, lookup_timeout_s=limit_s, breaker_cooldown_s=60)
    member = Member("tier 'a'", "a", store, limits)
    yield member
    store.go_on()
    member.close(Deadline(1))


HASTY = pytest.mark.parametrize("limit_s", [0.5])


class TestBreakers:
    def test_a_store_that_keeps_failing_is_not_asked(
        self, member: Member, store: Controlled
    ) -> None:
        store.is_down = True
        for _ in range(3):
            with pytest.raises(StorageUnavailable, match="refused"):
                member.exists(SPACE, [A])
        store.calls.clear()

        with pytest.raises(StorageUnavailable, match="tier 'a' failed"):
            member.exists(SPACE, [A])
        assert [] == store.calls
        assert "open" == member.state

    def test_writes_have_a_breaker_of_their_own(self, member: Member, store: Controlled) -> None:
        member.set(SPACE, [A], [page()])
        store.is_down_after = True
        for _ in range(3):
            with pytest.raises(StorageTimeout):
                member.set(SPACE, [A], [page()])

        assert [True] == member.exists(SPACE, [A])

    @HASTY
    def test_one_hang_opens_the_breaker(self, member: Member, store: Controlled) -> None:
        store.hang("get")

        with pytest.raises(StorageTimeout, match="tier 'a' did not answer within"):
            member.begin_get(SPACE, [A], [blank()]).result()
        with pytest.raises(StorageUnavailable):
            member.begin_get(SPACE, [A], [blank()])

    @HASTY
    def test_a_call_that_found_no_thread_says_nothing(
        self, member: Member, store: Controlled
    ) -> None:
        store.hang("exists")
        hung = member.begin_exists(SPACE, [A])
        wait_until(lambda: store.calls == ["exists"])
        queued = member.begin_exists(SPACE, [B])

        with pytest.raises(StorageTimeout):
            queued.result()
        assert "closed" == member.state
        store.go_on()
        hung.future.result()

    def test_a_probe_that_found_no_thread_keeps_the_breaker_open(self, store: Controlled) -> None:
        limits = LimitSettings(timeout_s=0.5, lookup_timeout_s=0.5, breaker_cooldown_s=1.5)
        member = Member("tier 'a'", "a", store, limits)
        store.hang("exists")
        with pytest.raises(StorageTimeout):
            member.begin_exists(SPACE, [A]).result()
        wait_until(lambda: member.state == "half_open")
        with pytest.raises(StorageTimeout):
            member.begin_exists(SPACE, [A]).result()

        with pytest.raises(StorageUnavailable):
            member.begin_exists(SPACE, [A])
        store.go_on()
        member.close(Deadline(1))

    def test_a_caller_may_wait_for_the_end(self, member: Member, store: Controlled) -> None:
        store.hang("exists")
        call = member.begin_exists(SPACE, [A])
        wait_until(lambda: store.calls == ["exists"])
        store.go_on()

        assert [False] == call.result(may_leave=False)

    def test_a_malformed_answer_is_a_failure(
        self, member: Member, store: Controlled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_answers(*_: object) -> list[bool]:
            return []

        monkeypatch.setattr(store, "batch_exists", no_answers)

        with pytest.raises(ValueError, match="0 results for 1 pages"):
            member.exists(SPACE, [A])
        assert 1 == member.counters.snapshot()["failed_calls"]


class TestDoubts:
    def test_a_page_in_doubt_is_a_miss_until_it_is_set(
        self, member: Member, store: Controlled
    ) -> None:
        store.batch_set(SPACE, [A, B], [page(), page()])
        member.doubt(SPACE, [A])

        assert [False, True] == member.exists(SPACE, [A, B])
        assert [False, True] == member.get(SPACE, [A, B], [blank(), blank()])
        assert [True] == member.set(SPACE, [A], [page()])
        assert [True, True] == member.exists(SPACE, [A, B])

    def test_a_delete_ends_the_doubt(self, member: Member, store: Controlled) -> None:
        member.doubt(SPACE, [A])

        assert [True] == member.delete(SPACE, [A])
        store.batch_set(SPACE, [A], [page()])
        assert [True] == member.exists(SPACE, [A])

    @HASTY
    def test_a_page_is_not_gone_while_its_doubtful_write_runs(
        self, member: Member, store: Controlled
    ) -> None:
        store.hang("set")
        call = member.begin_set(SPACE, [A], [page()])
        member.doubt(SPACE, [A], call.future)

        assert [False] == member.delete(SPACE, [A])
        store.go_on()
        call.future.result()
        assert [True] == member.delete(SPACE, [A])

    def test_a_delete_that_was_overtaken_by_the_doubtful_write_ends_no_doubt(
        self, member: Member, store: Controlled
    ) -> None:
        store.hang("set", "delete")
        write = member.begin_set(SPACE, [A], [page()]).future
        member.doubt(SPACE, [A], write)
        with ThreadPoolExecutor() as pool:
            removal = pool.submit(member.delete, SPACE, [A])
            wait_until(lambda: {"set", "delete"} <= {*store.calls})
            gate = store.gates.pop("delete")
            store.go_on()
            write.result()
            gate.set()

            assert [False] == removal.result()

    @HASTY
    def test_a_page_is_not_gone_while_one_of_two_doubtful_writes_runs(
        self, member: Member, store: Controlled
    ) -> None:
        store.hang("set")
        write = member.begin_set(SPACE, [A], [page()]).future
        ended = Future[list[bool]]()
        ended.set_result([True])
        member.doubt(SPACE, [A], write)
        member.doubt(SPACE, [A], ended)

        assert [False] == member.delete(SPACE, [A])
        store.go_on()
        write.result()
        assert [True] == member.delete(SPACE, [A])

    def test_a_delete_that_was_left_behind_takes_no_page_whose_set_was_true(
        self, store: Controlled
    ) -> None:
        limits = LimitSettings(timeout_s=0.5, breaker_cooldown_s=0.01)
        member = Member("stripe 'a'", "a", store, limits, threads=2)
        member.set(SPACE, [A], [page()])
        store.hang("delete")
        late = member.begin_delete(SPACE, [A])
        with pytest.raises(StorageTimeout):
            late.result()
        wait_until(lambda: member.state == "half_open")

        assert [False] == member.begin_set(SPACE, [A], [page()]).result()
        store.go_on()
        late.future.result()
        assert [False] == member.exists(SPACE, [A])
        assert [True] == member.set(SPACE, [A], [page()])
        assert [True] == member.exists(SPACE, [A])
        member.close(Deadline(1))


def test_a_call_after_the_close_starts_no_thread(member: Member) -> None:
    member.close(Deadline(1))

    with pytest.raises(StorageClosed):
        member.begin_exists(SPACE, [A])


def test_a_key_space_is_opened_once(
    member: Member, store: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(store, "open_space", opened.append)

    member.set(SPACE, [A], [page()])
    member.set(SPACE, [B], [page()])
    member.forget_space(SPACE.id)
    member.set(SPACE, [A], [page()])

    assert [SPACE, SPACE] == opened


def test_only_the_key_spaces_that_were_opened_last_are_remembered(
    member: Member, store: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(store, "open_space", opened.append)
    monkeypatch.setattr("hicache_storage.composition.member._MOST_OPENED", 2)
    first, *others = spaces = [space(tenant=name) for name in "abc"]

    for each in [*spaces, *others, first]:
        member.set(each, [A], [page()])

    assert [*spaces, first] == opened


def test_key_spaces_are_opened_while_another_one_is_forgotten(member: Member) -> None:
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(
            lambda: [member.set(space(tenant=str(n)), [A], [page()]) for n in range(1000)]
        )
        while not opening.done():
            member.forget_space(SPACE.id)

        assert [[True]] * 1000 == opening.result()
