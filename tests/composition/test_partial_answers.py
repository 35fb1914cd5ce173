"""A part of a store that does not answer: its pages are misses, but nobody says that they are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from composed_stores import Controlled, memory_member
from framed import HASHES, TARGET, empty, filled, transfer
from hicache_backends.striped import StripedSettings, StripedStorage
from hicache_backends.tiered import TieredSettings, TieredStorage
from sealed_stores import sealed_over

from hicache_storage.backend_support.answers import PartialAnswers, answers_of, unanswered_in
from hicache_storage.events import observer
from hicache_storage.events.messages import BlockStored
from hicache_storage.events.observer import EventObserver
from hicache_storage.events.settings import EventSettings
from hicache_storage.page_store import PageStore, PoolSpec
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import HiCacheStorage

OK, MISS, PART = Verdict.OK, Verdict.MISS, Verdict.PART_UNAVAILABLE
LIMITS = {"timeout_s": 60, "lookup_timeout_s": 60, "breaker_failures": 100}


def striped(parts: dict[str, Controlled], **limits: Any) -> HiCacheStorage:
    members = [memory_member(name) for name in parts]
    settings = StripedSettings.parse("striped", {"stripes": members, **LIMITS, **limits})
    return StripedStorage(parts, settings)


def tiered(parts: dict[str, Controlled], **limits: Any) -> HiCacheStorage:
    """Two tiers: the stripes, and a store that does not keep what it is given."""
    below = Controlled()
    below.is_full = True
    members = [memory_member(name) for name in ("nvme", "far")]
    settings = TieredSettings.parse("tiered", {"tiers": members, **LIMITS, **limits})
    tiers = {"nvme": striped(parts, **limits), "far": below}
    return TieredStorage(tiers, settings, read_only=False)


def sealed(parts: dict[str, Controlled], **limits: Any) -> HiCacheStorage:
    return sealed_over(striped(parts, **limits))


class Site:
    """A store over two stores under a test's control, with a page store that publishes events."""

    def __init__(self, made: Callable[..., HiCacheStorage], published: list[Any]) -> None:
        self.parts = {name: Controlled() for name in "ab"}
        self._made = made
        self.published = published
        self._opened = ExitStack()

    def open(self, **limits: Any) -> PageStore:
        storage = self._opened.enter_context(self._made(self.parts, **limits))
        settings = EventSettings.parse("test", {"endpoint": "tcp://127.0.0.1:1"})
        events = EventObserver(settings, announces=lambda _: True, hash_format="int64")
        store = self._opened.enter_context(PageStore(storage, observers=[events]))
        store.open_space(TARGET)
        return store

    def close(self) -> None:
        for part in self.parts.values():
            part.go_on()
        self._opened.close()


class Publisher:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def publish(self, events: list[Any]) -> bool:
        self._events += events
        return True

    def stats(self) -> dict[str, int]:
        return {}


@pytest.fixture(params=[striped, tiered, sealed])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    published: list[Any] = []

    def acquire(settings: EventSettings, rank: int | None) -> Publisher:
        return Publisher(published)

    monkeypatch.setattr(observer, "acquire_publisher", acquire)
    made = Site(request.param, published)
    yield made
    made.close()


def load(store: PageStore) -> list[Verdict]:
    pages = empty()
    (verdicts,) = store.load([transfer(pages)]).verdicts
    for verdict, page, right in zip(verdicts, pages, filled(), strict=True):
        assert verdict is not OK or page.tobytes() == right.tobytes()
    return verdicts


def test_pages_of_a_part_that_is_down_are_not_announced_as_removed(site: Site) -> None:
    store = site.open()
    assert [OK] * 8 == store.save([transfer(filled())]).verdicts[0]
    assert [BlockStored] == [type(event) for event in site.published]
    site.parts["b"].is_down = True

    assert {OK, PART} == {*load(store)}
    assert {OK, PART} == {*store.lookup(TARGET, HASHES)}
    match = store.match(HASHES, [PoolSpec(space=TARGET)], past_gaps=True)
    assert ([None], False) == (match.failures, all(match.present[0]))
    site.parts["b"].is_down = False

    assert [OK] * 8 == load(store)
    assert [OK] * 8 == store.lookup(TARGET, HASHES)
    assert [BlockStored] == [type(event) for event in site.published]


def test_pages_of_a_part_that_is_late_are_not_announced_as_removed(site: Site) -> None:
    store = site.open(timeout_s=0.5, lookup_timeout_s=0.5)
    assert [OK] * 8 == store.save([transfer(filled())]).verdicts[0]
    site.parts["b"].hang("exists")

    assert {OK, PART} == {*store.lookup(TARGET, HASHES)}
    site.parts["b"].go_on()

    assert [BlockStored] == [type(event) for event in site.published]


def test_pages_that_a_part_has_lost_are_announced_as_removed(site: Site) -> None:
    store = site.open()
    store.save([transfer(filled())])
    framed = store.framed(TARGET)
    for part in site.parts.values():
        for space in [*part.spaces()]:
            part.clear(space)
    site.parts["b"].is_down = True

    assert {MISS, PART} == {*load(store)}

    (_, gone) = site.published
    assert 0 < len(gone.block_hashes) < 8
    assert not store.storage.batch_exists(framed, HASHES)[0]


def test_lookups_count_pages_without_an_answer(site: Site) -> None:
    store = site.open()
    store.save([transfer(filled())])
    site.parts["b"].is_down = True

    verdicts = store.lookup(TARGET, HASHES)

    counts = store.stats()
    assert verdicts.count(OK) == counts["match_present"]
    assert verdicts.count(PART) == counts["match_unanswered"] > 0
    assert 0 == counts.get("match_absent", 0)
    load(store)
    assert verdicts.count(PART) == store.stats()["load_part_unavailable"]


def test_answers_without_a_gap_are_a_plain_list() -> None:
    assert [True, False] == answers_of([True, False])
    assert not isinstance(answers_of([True, False]), PartialAnswers)
    assert frozenset() == unanswered_in([True, False])
