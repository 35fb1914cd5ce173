"""Explanations of the number of pages that a request got."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engines import PROMPT, cache_pools, compute, engine_on
from pages import hash_of
from stores import HookedStorage, failing

from hicache_storage.controller import Reason
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def storage() -> HookedStorage:
    storage = HookedStorage()
    with engine_on(storage, cache_pools()) as first:
        compute(first, PROMPT)
        assert first.drain(20)
    return storage


def explained(storage: HookedStorage, **settings: Any) -> str:
    """Return the explanation of a new engine's request for the prompt."""
    with engine_on(storage, cache_pools(), **settings) as engine:
        engine.prefetch("r", PROMPT).result().release()
        return str(engine.explain("r"))


def test_a_whole_prefix_needs_no_reason(storage: HookedStorage) -> None:
    assert explained(storage) == (
        "request 'r': 16 of 16 pages are usable (0 from host memory, 16 from storage)"
    )


def test_a_page_that_storage_lacks_is_named_with_its_pool(storage: HookedStorage) -> None:
    (draft,) = (space for space in storage.inner.spaces() if space.pool == "draft")
    storage.inner.batch_delete(draft, PROMPT[6:7])

    assert explained(storage) == (
        "request 'r': 6 of 16 pages are usable (0 from host memory, 6 from storage);"
        " page 6 of pool 'draft' was not in storage"
    )


def test_a_corrupt_page_is_distinguished_from_an_absent_one(storage: HookedStorage) -> None:
    (target,) = (space for space in storage.inner.spaces() if space.pool == "kv")
    pages = storage.inner._spaces[target]
    pages[PROMPT[5]] = pages[PROMPT[5]][:-1] + b"?"

    assert "page 5 of pool 'kv' was corrupt in storage" in explained(storage)


@pytest.mark.parametrize("operation", ["batch_exists", "batch_get"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StorageUnavailable("down"), Reason.UNAVAILABLE),
        (StorageTimeout("slow"), Reason.TIMEOUT),
        (RuntimeError("bug"), Reason.STORE_ERROR),
    ],
)
def test_a_store_that_does_not_answer_is_explained(
    storage: HookedStorage, operation: str, error: Exception, reason: Reason
) -> None:
    storage.hooks[operation] = failing(error)

    assert f"page 0 of pool 'kv' {reason.value}" in explained(storage)


def test_a_page_that_vanished_since_the_lookup_is_explained(storage: HookedStorage) -> None:
    (target,) = (space for space in storage.inner.spaces() if space.pool == "kv")

    def vanish(answer: Callable[[], Any]) -> Any:
        storage.inner.batch_delete(target, PROMPT[9:10])
        return answer()

    storage.hooks["batch_get"] = vanish

    assert "page 9 of pool 'kv' was gone when it was read" in explained(storage)


def test_few_tokens_are_explained(storage: HookedStorage) -> None:
    assert "prefetch threshold" in explained(storage, prefetch_threshold_tokens=10_000)


def test_full_host_memory_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools(10)) as engine:
        engine.prefetch("r", PROMPT).result().release()
        explained = engine.explain("r")

    assert (10, Reason.NO_HOST_SLOT) == (explained.first_missing, explained.reason)


def test_an_open_breaker_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools()) as engine:
        attached = engine._attached
        assert attached is not None
        for _ in range(1000):
            attached.store.breaker.record(succeeded=False)
        engine.prefetch("r", PROMPT).result().release()
        assert engine.explain("r").reason is Reason.BREAKER_OPEN


def test_a_cancelled_request_is_explained(storage: HookedStorage) -> None:
    with engine_on(storage, cache_pools()) as engine:
        engine.prefetch("r", PROMPT).cancel()
        assert engine.explain("r").reason is Reason.CANCELLED


def test_the_last_requests_are_remembered_and_no_more() -> None:
    with engine_on(None, cache_pools(), explained_requests=2) as engine:
        for number in range(3):
            engine.prefetch(f"{number}", [hash_of(number)]).result().release()

        assert engine.explain("2").asked_pages == 1
        assert engine.explain("1").asked_pages == 1
        with pytest.raises(LookupError, match="'0' is not among the last 2"):
            engine.explain("0")


def test_every_reason_completes_the_sentence_about_a_page() -> None:
    for reason in Reason:
        assert reason.value.split()[0] in {"was", "did", "could", "had", "is", "cannot"}
