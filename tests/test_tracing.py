from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from engines import PROMPT, cache_pools, compute, engine_on
from framed import DRAFT, HASHES, NBYTES, TARGET, empty, filled, framed, transfer
from job_runners import SPACE, Engine, batch, target
from opentelemetry.trace import SpanKind, StatusCode
from servers import ROOT
from spans import Spans, is_child
from stores import Gate, HookedStorage, failing

from hicache_storage.errors import StorageUnavailable
from hicache_storage.page_store import PageStore, PoolSpec
from hicache_storage.page_store.results import Transfer
from hicache_storage.tracing import SpanTracer


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def tracer(spans: Spans) -> SpanTracer:
    return SpanTracer({"backend": "memory"}, tracer_provider=spans.provider)


@pytest.fixture
def storage() -> HookedStorage:
    return HookedStorage()


@pytest.fixture
def store(storage: HookedStorage, tracer: SpanTracer) -> Iterator[PageStore]:
    with PageStore(storage, observers=[tracer]) as opened:
        opened.open_space(TARGET)
        opened.open_space(DRAFT)
        yield opened


class TestCalls:
    def test_a_save_has_pages_bytes_and_verdicts(
        self, store: PageStore, storage: HookedStorage, spans: Spans
    ) -> None:
        storage.hooks["batch_set"] = lambda answer: [True, True, False]

        store.save([transfer(filled(3))])

        span = spans.only("hicache.save")
        assert {
            "hicache.backend": "memory",
            "hicache.pools": ("kv",),
            "hicache.pages": 3,
            "hicache.pages.ok": 2,
            "hicache.pages.refused": 1,
            "hicache.nbytes": 2 * NBYTES,
        } == span.attributes
        assert (SpanKind.CLIENT, StatusCode.UNSET) == (span.kind, span.status.status_code)

    def test_a_load_of_two_pools_is_one_span(self, store: PageStore, spans: Spans) -> None:
        store.save([transfer(filled(1)), Transfer(DRAFT, HASHES[:1], [framed(2)])])

        store.load([transfer(empty(2)), Transfer(DRAFT, HASHES[:1], [framed(0)])])

        attributes = spans.only("hicache.load").attributes or {}
        assert ("kv", "draft") == attributes["hicache.pools"]
        assert (2, 1) == (attributes["hicache.pages.ok"], attributes["hicache.pages.miss"])
        assert 2 * NBYTES == attributes["hicache.nbytes"]

    def test_a_span_lasts_as_long_as_its_call(self, store: PageStore, spans: Spans) -> None:
        store.save([transfer(filled(1))])
        store.load([transfer(empty(1))])

        save, load = spans.only("hicache.save"), spans.only("hicache.load")
        times = [save.start_time, save.end_time, load.start_time, load.end_time]
        assert None not in times
        assert sorted(time for time in times if time is not None) == times

    def test_a_wrong_page_makes_the_span_an_error(
        self, store: PageStore, storage: HookedStorage, spans: Spans
    ) -> None:
        store.save([transfer(filled(1))])
        storage.hooks["batch_get"] = lambda answer: [True]

        store.load([transfer(empty(1))])

        status = spans.only("hicache.load").status
        assert (StatusCode.ERROR, "corrupt") == (status.status_code, status.description)

    def test_a_miss_is_no_error(self, store: PageStore, spans: Spans) -> None:
        store.load([transfer(empty(1))])

        assert spans.only("hicache.load").status.status_code is StatusCode.UNSET

    def test_a_match_has_its_prefix(self, store: PageStore, spans: Spans) -> None:
        store.save([transfer(filled(2))])

        store.match(HASHES, [PoolSpec(space=TARGET)])

        attributes = spans.only("hicache.match").attributes or {}
        assert (8, 2) == (attributes["hicache.pages"], attributes["hicache.pages.prefix"])

    def test_a_lookup_without_an_answer_is_an_error(
        self, store: PageStore, storage: HookedStorage, spans: Spans
    ) -> None:
        storage.hooks["batch_exists"] = failing(StorageUnavailable("no one answers"))

        store.present(TARGET, HASHES[:3])

        span = spans.only("hicache.present")
        assert (StatusCode.ERROR, "unavailable") == (
            span.status.status_code,
            span.status.description,
        )
        assert 3 == (span.attributes or {})["hicache.pages.unanswered"]

    def test_deletes_and_clears_have_their_pages(self, store: PageStore, spans: Spans) -> None:
        store.save([transfer(filled(3))])

        store.delete(TARGET, HASHES[:1])
        store.clear(TARGET)

        assert 1 == (spans.only("hicache.delete").attributes or {})["hicache.pages.gone"]
        assert 2 == (spans.only("hicache.clear").attributes or {})["hicache.pages"]


class TestController:
    def test_a_prefetch_is_the_parent_of_its_lookup_and_its_loads(
        self, storage: HookedStorage, tracer: SpanTracer, spans: Spans
    ) -> None:
        with engine_on(storage, cache_pools()) as engine:
            compute(engine, PROMPT[:8])
            assert engine.drain(20)

        with engine_on(storage, cache_pools(), observers=[tracer]) as engine:
            engine.prefetch("request-7", PROMPT).result().release()

        prefetch = spans.only("hicache.prefetch")
        attributes = prefetch.attributes or {}
        assert ("request-7", 16) == (attributes["hicache.request"], attributes["hicache.pages"])
        assert (8, 8, "absent") == (
            attributes["hicache.pages.usable"],
            attributes["hicache.pages.l3"],
            attributes["hicache.reason"],
        )
        loads = spans.named("hicache.load")
        assert len(loads) == 2
        assert all(is_child(span, prefetch) for span in [spans.only("hicache.match"), *loads])

    def test_a_prefetch_belongs_to_the_engines_own_span(
        self,
        storage: HookedStorage,
        tracer: SpanTracer,
        spans: Spans,
    ) -> None:
        with engine_on(storage, cache_pools(), observers=[tracer]) as engine:
            with spans.provider.get_tracer("engine").start_as_current_span("request"):
                prefetch = engine.prefetch("r", PROMPT)
            prefetch.result().release()

        assert is_child(spans.only("hicache.prefetch"), spans.only("request"))

    def test_a_cancelled_prefetch_ends_its_span(
        self, storage: HookedStorage, tracer: SpanTracer, spans: Spans
    ) -> None:
        with engine_on(storage, cache_pools(), observers=[tracer]) as engine:
            engine.prefetch("r", PROMPT).cancel()

        attributes = spans.only("hicache.prefetch").attributes or {}
        assert "cancelled" == attributes["hicache.reason"]

    def test_a_writeback_is_the_parent_of_its_save(
        self, storage: HookedStorage, tracer: SpanTracer, spans: Spans
    ) -> None:
        with engine_on(storage, cache_pools(), observers=[tracer]) as engine:
            compute(engine, PROMPT[:4])
            assert engine.drain(20)

        writebacks = spans.named("hicache.writeback")
        written = [(span.attributes or {})["hicache.pages.written"] for span in writebacks]
        saves = spans.named("hicache.save")
        assert sum(pages for pages in written if isinstance(pages, int)) == 4
        assert len(writebacks) == len(saves)
        assert all(any(is_child(save, of) for of in writebacks) for save in saves)


class TestJobs:
    def test_a_job_of_an_engine_is_the_parent_of_its_calls(
        self, storage: HookedStorage, tracer: SpanTracer, spans: Spans
    ) -> None:
        engine = Engine(storage, observers=[tracer])
        try:
            engine.save(batch(range(3)))
            engine.load(target(range(4)))
        finally:
            engine.close()

        job = spans.only("hicache.load_job")
        attributes = job.attributes or {}
        assert (4, 3, 1) == (
            attributes["hicache.pages"],
            attributes["hicache.pages.ok"],
            attributes["hicache.pages.miss"],
        )
        assert 3 * SPACE.page_nbytes == attributes["hicache.nbytes"]
        assert is_child(spans.only("hicache.load"), job)
        assert is_child(spans.only("hicache.save"), spans.only("hicache.store_job"))

    def test_a_job_that_finds_no_room_has_a_span_with_its_verdicts(
        self, storage: HookedStorage, tracer: SpanTracer, spans: Spans
    ) -> None:
        gate = Gate()
        storage.hooks["batch_set"] = gate
        engine = Engine(storage, observers=[tracer], queued_nbytes=1)
        try:
            for number in range(10):
                engine.runner.submit_store(number, [batch(range(3))])
            (*_, last) = spans.named("hicache.store_job")
        finally:
            gate.open()
            engine.close()

        assert 3 == (last.attributes or {})["hicache.pages.refused"]


@pytest.mark.parametrize(
    "name",
    [
        *("match", "present", "load", "save", "delete", "clear", "prefetch", "writeback"),
        *("load_job", "store_job", "transfer"),
    ],
)
def test_a_span_is_in_the_table_of_the_page(name: str) -> None:
    page = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
    (spans,) = re.findall(r"^## Spans$(.*?)^## ", page, re.DOTALL | re.MULTILINE)

    assert any(f"`{name}`" in row.split("|")[1] for row in spans.splitlines() if row[:1] == "|")
