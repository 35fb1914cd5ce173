from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from composed_stores import Controlled, memory_member
from framed import HASHES as FRAMED_HASHES
from framed import TARGET, empty, filled, transfer
from hicache_backends.striped import StripedSettings, StripedStorage
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Verdict

SPACE = space()
HASHES = [hash_of(number) for number in range(64)]


class Stripes:
    """Stores under a test's control, as one storage."""

    def __init__(self, names: str = "abcd", **config: object) -> None:
        self.stores = {name: Controlled() for name in names}
        limits = {"timeout_s": 60, "lookup_timeout_s": 60, "breaker_cooldown_s": 60}
        members = [memory_member(name) for name in names]
        self.config = {"stripes": members, **limits, **config}
        settings = StripedSettings.parse("striped", self.config)
        self.storage = StripedStorage(self.stores, settings)
        self.storage.open_space(SPACE)

    def set(self) -> list[bool]:
        pages = [page(seed=number) for number in range(64)]
        return self.storage.batch_set(SPACE, HASHES, pages)

    def get(self) -> list[bool]:
        """Read all pages. Check that each hit has its own bytes."""
        targets = [blank() for _ in HASHES]
        hits = self.storage.batch_get(SPACE, HASHES, targets)
        for number, (hit, target) in enumerate(zip(hits, targets, strict=True)):
            assert not hit or target.tobytes() == page(seed=number).tobytes()
        return hits

    def of(self, name: str) -> list[bool]:
        """Return which pages a stripe has."""
        return [self.stores[name].has(SPACE, one) for one in HASHES]


Build = Callable[..., Stripes]


@pytest.fixture
def build() -> Iterator[Build]:
    made: list[Stripes] = []

    def build(names: str = "abcd", **config: object) -> Stripes:
        made.append(Stripes(names, **config))
        return made[-1]

    yield build
    for stripes in made:
        for store in stripes.stores.values():
            store.go_on()
        stripes.storage.close()


def test_each_page_is_in_one_stripe(build: Build) -> None:
    stripes = build()

    assert [True] * 64 == stripes.set()
    assert [True] * 64 == stripes.get()
    assert [1] * 64 == [sum(found) for found in zip(*map(stripes.of, "abcd"), strict=True)]


def test_a_stripe_that_is_down_costs_its_share(build: Build) -> None:
    stripes = build()
    stripes.set()
    stripes.stores["b"].is_down = True

    assert [not lost for lost in stripes.of("b")] == stripes.get()
    assert [not lost for lost in stripes.of("b")] == stripes.storage.batch_exists(SPACE, HASHES)
    assert [not lost for lost in stripes.of("b")] == stripes.storage.batch_delete(SPACE, HASHES)


def test_a_call_for_one_dead_stripe_alone_misses_while_another_stripe_works(build: Build) -> None:
    stripes = build()
    stripes.set()
    stripes.stores["b"].is_down = True
    lost = [one for one, is_there in zip(HASHES, stripes.of("b"), strict=True) if is_there]

    for one in lost:
        assert [False] == stripes.storage.batch_exists(SPACE, [one])
        assert [False] == stripes.storage.batch_get(SPACE, [one], [blank()])
        assert [False] == stripes.storage.batch_set(SPACE, [one], [page()])
        assert [False] == stripes.storage.batch_delete(SPACE, [one])


def test_a_dead_stripe_opens_the_page_stores_breaker_for_no_other_stripe(
    build: Build,
) -> None:
    stripes = build()
    dead = stripes.stores["b"]
    with PageStore(stripes.storage) as store:
        store.open_space(TARGET)
        assert [Verdict.OK] * 8 == store.save([transfer(filled())]).verdicts[0]
        in_dead = [dead.has(store.framed(TARGET), one) for one in FRAMED_HASHES[:8]]
        assert {True, False} == {*in_dead}
        dead.is_down = True

        for _ in range(3):
            for n, is_lost in enumerate(in_dead):
                expected = Verdict.PART_UNAVAILABLE if is_lost else Verdict.OK
                target = transfer(empty(1), FRAMED_HASHES[n : n + 1])
                assert [[expected]] == store.load([target]).verdicts
        assert "closed" == store.breaker.state


def test_a_call_raises_if_no_stripe_answers(build: Build) -> None:
    stripes = build()
    for store in stripes.stores.values():
        store.is_down = True

    with pytest.raises(StorageUnavailable):
        stripes.get()


def test_a_refused_page_does_not_appear_when_its_stripe_is_back(build: Build) -> None:
    stripes = build(breaker_cooldown_s=0.01)
    stripes.stores["b"].is_down_after = True

    stored = stripes.set()
    stripes.stores["b"].is_down_after = False

    assert [True] * 64 != stored
    wait_until(lambda: True in stripes.get())
    assert any(stripes.of("b")), "the failed set has stored pages"
    assert stored == stripes.get()
    assert stored == stripes.storage.batch_exists(SPACE, HASHES)


def test_a_page_in_doubt_can_be_set_again(build: Build) -> None:
    stripes = build(breaker_failures=10)
    stripes.stores["b"].is_down_after = True
    stripes.set()
    stripes.stores["b"].is_down_after = False

    assert [True] * 64 == stripes.set()
    assert [True] * 64 == stripes.get()


def test_stripes_work_at_the_same_time(build: Build) -> None:
    stripes = build()
    stripes.set()
    for store in stripes.stores.values():
        store.calls.clear()
        store.hang("exists")

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(stripes.storage.batch_exists, SPACE, HASHES)
        wait_until(lambda: all("exists" in store.calls for store in stripes.stores.values()))
        for store in stripes.stores.values():
            store.go_on()

    assert [True] * 64 == asking.result()


def test_one_stripe_is_asked_in_the_thread_that_waits_for_it(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripes = build("abc")
    asked_in: list[int] = []
    for store in stripes.stores.values():

        def get(*arguments: Any, real: Any = store.batch_get) -> list[bool]:
            asked_in.append(threading.get_ident())
            found: list[bool] = real(*arguments)
            return found

        monkeypatch.setattr(store, "batch_get", get)
    stripes.set()

    assert [True] * 64 == stripes.get()
    assert (3, 1) == (len(asked_in), asked_in.count(threading.get_ident()))


def test_a_hung_stripe_holds_no_caller_of_one_page(build: Build) -> None:
    stripes = build(lookup_timeout_s=0.5)
    stripes.set()
    stripes.stores["b"].hang("exists")
    lost = HASHES[stripes.of("b").index(True)]

    assert [False] == stripes.storage.batch_exists(SPACE, [lost])


def test_a_stripe_takes_as_many_calls_at_a_time_as_the_whole(build: Build) -> None:
    stripes = build()
    stripes.stores["a"].narrow(parallelism=2)
    storage = StripedStorage(stripes.stores, StripedSettings.parse("striped", stripes.config))
    storage.open_space(SPACE)
    stripes.stores["b"].hang("exists")

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(storage.batch_exists, SPACE, HASHES) for _ in "12"]
        wait_until(lambda: 2 == stripes.stores["b"].calls.count("exists"))
        stripes.stores["b"].go_on()
        assert [[False] * 64] * 2 == [one.result() for one in asking]
    storage.close()


def test_a_stripe_that_does_not_open_a_key_space_delays_it_once(build: Build) -> None:
    stripes = build(timeout_s=0.5)
    stripes.stores["b"].hang("open")

    for name in "xy":
        stripes.storage.open_space(space(tenant=name))
    stripes.stores["b"].go_on()

    assert 1 == stripes.stores["b"].calls.count("open") - 1


def test_after_an_interrupt_no_stripe_uses_the_callers_pages(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripes = build("ab")
    stripes.set()

    def interrupted(*_: object) -> list[bool]:
        wait_until(lambda: "get" in stripes.stores["b"].calls)
        threading.Timer(0.1, stripes.stores["b"].go_on).start()
        raise KeyboardInterrupt

    stripes.stores["b"].hang("get")
    for store in stripes.stores.values():
        vars(store)["capabilities"] = replace(store.capabilities, revocable=False)
    monkeypatch.setattr(stripes.stores["a"], "batch_get", interrupted)
    targets = [blank() for _ in HASHES]
    with pytest.raises(KeyboardInterrupt):
        stripes.storage.batch_get(SPACE, HASHES, targets)
    after = [target.tobytes() for target in targets]

    assert not stripes.stores["b"].gates, "the call returned before its stripe had ended"
    assert after == [target.tobytes() for target in targets]


@pytest.mark.parametrize("call", ["get", "set"])
def test_a_late_stripe_touches_no_page_after_the_answer(build: Build, call: str) -> None:
    stripes = build("ab", timeout_s=0.2)
    late = stripes.stores["b"]
    with PageStore(stripes.storage) as store:
        store.open_space(TARGET)
        framed = store.framed(TARGET)
        if call == "get":
            store.save([transfer(filled())])
        late.hang(call)
        memory = empty() if call == "get" else filled()
        (verdicts,) = (store.load if call == "get" else store.save)([transfer(memory)]).verdicts
        assert 0 < verdicts.count(Verdict.OK) < 8
        for one in memory:
            one.copy_from(b"\x99" * one.nbytes)
        late.go_on()
        wait_until(lambda: not stripes.storage._members[1].doubtful_writes(framed.id))
        stripes.storage.close()  # waits for the late call

    assert {b"\x99" * TARGET.page_nbytes} == {one.tobytes() for one in memory}
    for page_hash, right in zip(FRAMED_HASHES, filled(), strict=True):
        if late.has(framed, page_hash):
            stored = bytes(late._spaces[framed][page_hash])
            assert stored[framed.frame_nbytes :] == right.tobytes()


def test_nothing_is_cleared_while_a_write_that_was_given_up_runs(build: Build) -> None:
    stripes = build(timeout_s=1)
    stripes.stores["b"].hang("set")
    pages = [page(seed=number) for number in range(64)]
    for each in pages:
        each.revocable = AtomicRevocable()
    vars(stripes.stores["b"])["capabilities"] = replace(
        stripes.stores["b"].capabilities, revocable=True
    )
    assert [True] * 64 != stripes.storage.batch_set(SPACE, HASHES, pages)

    with pytest.raises(StorageTimeout, match="are still under way"):
        stripes.storage.clear(SPACE)
    with pytest.raises(StorageTimeout, match="are still under way"):
        stripes.storage.remove_space(SPACE.id)
    stripes.stores["b"].go_on()
    wait_until(lambda: any(stripes.of("b")))
    stripes.storage.clear(SPACE)
    assert [False] * 64 == stripes.of("b")


def test_clear_and_remove_space_return_the_sum(build: Build) -> None:
    stripes = build()
    stripes.set()
    assert 64 == stripes.storage.clear(SPACE)
    stripes.set()
    assert 64 == stripes.storage.remove_space(SPACE.id)
    assert [True] * 64 == stripes.set()


def test_shares_of_pages_follow_the_weights(build: Build) -> None:
    assert {"a": 0.75, "b": 0.25} == build("ab", weights={"a": 3, "b": 1}).storage.page_shares()


def test_an_empty_batch_has_no_answers(build: Build) -> None:
    storage = build().storage

    assert [] == storage.batch_exists(SPACE, [])
    assert [] == storage.batch_get(SPACE, [], [])
    assert [] == storage.batch_set(SPACE, [], [])
    assert [] == storage.batch_delete(SPACE, [])
