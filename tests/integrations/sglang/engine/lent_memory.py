"""Which stores get SGLang's memory below its cache controller, and how it is taken back."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from servers import wait_until
from sglang_engine import PAGE_TOKENS, TOKENS, Engine, PoolName, PoolPlan, engine_world, tensors_of

from hicache_storage.page import Page
from hicache_storage.storage import Capabilities

POOLS = [
    PoolPlan(kind=kind, layout=layout)
    for kind in ("mha", "mla")
    for layout in ("page_first", "layer_first")
] + [PoolPlan(kind="asymmetric")]


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


class Hanging:
    """A replacement for a storage operation. After `first` calls it hangs until `released` is set."""

    def __init__(self, storage: Any, operation: str, first: int = 0) -> None:
        self.released = threading.Event()
        self.ended = threading.Event()
        self._calls = 0
        self._first = first
        self._storage, self._operation = storage, operation
        self._act = getattr(storage, operation)
        setattr(storage, operation, self)

    def __call__(self, *arguments: Any) -> list[bool]:
        self._calls += 1
        if self._calls <= self._first:
            moved: list[bool] = self._act(*arguments)
            return moved
        self.released.wait(60)
        try:
            late: list[bool] = self._act(*arguments)
            return late
        finally:
            self.ended.set()

    def end(self) -> None:
        """Let the late call go on, and let later calls work again."""
        self.released.set()
        assert self.ended.wait(30)
        setattr(self._storage, self._operation, self._act)


@contextmanager
def hanging(engine: Engine, operation: str, first: int = 0) -> Generator[Hanging]:
    store = Hanging(engine.storage._storage, operation, first)
    try:
        yield store
    finally:
        store.released.set()


@pytest.fixture
def config(file_config: dict[str, Any]) -> dict[str, Any]:
    return {**file_config, "adapter": {"timeout_s": 0.5}}


@pytest.mark.parametrize(
    ("claims", "is_lent"),
    [
        (replace(FileStorage.capabilities, revocable=False), False),
        (replace(FileStorage.capabilities, revocable=False, bounded=True), False),
        (FileStorage.capabilities, True),
    ],
    ids=["neither", "bounded", "revocable"],
)
def test_only_revocable_stores_get_sglangs_memory(
    claims: Capabilities,
    is_lent: bool,  # noqa: FBT001 - a parameter of the test
    file_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FileStorage, "capabilities", claims)
    with Engine([PoolPlan()], file_config) as engine:
        assert is_lent is _is_lent(engine)
        assert 8 == engine.read(TOKENS).pages


def _is_lent(engine: Engine) -> bool:
    """Back up pages, and return True if the store got their memory."""
    store = engine.storage._storage
    batch_set, addresses = store.batch_set, list[int]()

    def watched(space: Any, hashes: Any, pages: Any) -> list[bool]:
        addresses.extend(address for page in pages for address, _ in page.addresses[1:])
        stored: list[bool] = batch_set(space, hashes, pages)
        return stored

    store.batch_set = watched
    engine.write(TOKENS)
    store.batch_set = batch_set
    return any(
        tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes
        for address in addresses
        for tensor in tensors_of(engine.host())
    )


@pytest.mark.parametrize("plan", POOLS, ids=lambda plan: f"{plan.kind}-{plan.layout}")
def test_a_get_that_hangs_touches_no_memory_after_the_call(
    plan: PoolPlan, config: dict[str, Any]
) -> None:
    with Engine([plan], config) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        indices = engine.host().alloc(8 * PAGE_TOKENS)
        with hanging(engine, "batch_get") as store:
            assert [False] * 8 == engine.storage.batch_get_v1(written.hashes, indices)
            engine.fill(2)
            before = engine.bytes_at(PoolName.KV, indices)
            store.end()

        assert before == engine.bytes_at(PoolName.KV, indices)
        wait_until(lambda: all(engine.storage.batch_get_v1(written.hashes, indices)))
        assert written.held[PoolName.KV] == engine.bytes_at(PoolName.KV, indices)


@pytest.mark.parametrize("plan", POOLS, ids=lambda plan: f"{plan.kind}-{plan.layout}")
def test_a_set_that_hangs_stores_no_page_of_later_content(
    plan: PoolPlan, config: dict[str, Any]
) -> None:
    with Engine([plan], config) as engine:
        engine.fill(1)
        with hanging(engine, "batch_set") as store:
            written = engine.write(TOKENS)
            assert not written.pages
            engine.fill(2)
            store.end()

        assert not engine.storage.batch_exists(written.hashes)
        wait_until(
            lambda: all(engine.storage.batch_set_v1(written.hashes, written.places[PoolName.KV]))
        )
        stored = engine.bytes_at(PoolName.KV, written.places[PoolName.KV])
        assert stored == engine.read(TOKENS).held[PoolName.KV]


def test_pages_that_arrived_before_the_deadline_count(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(FileStorage.capabilities, max_batch=4, parallelism=1)
    monkeypatch.setattr(FileStorage, "capabilities", small)
    with Engine([PoolPlan()], config) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        indices = engine.host().alloc(8 * PAGE_TOKENS)
        engine.wipe()
        before = engine.bytes_at(PoolName.KV, indices)
        with hanging(engine, "batch_get", first=1) as store:
            moved = engine.storage.batch_get_v1(written.hashes, indices)
            store.end()

        assert [True] * 4 + [False] * 4 == moved
        expected = written.held[PoolName.KV][:4] + before[4:]
        assert expected == engine.bytes_at(PoolName.KV, indices)


def test_a_flat_get_that_hangs_touches_no_memory_after_the_call(config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], config) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        targets = [engine.host().get_dummy_flat_data_page() for _ in written.hashes]
        with hanging(engine, "batch_get") as store:
            assert [None] * 8 == engine.storage.batch_get(written.hashes, targets)
            for target in targets:
                target.fill_(7)
            store.end()

        assert all(bool((target == 7).all()) for target in targets)


def test_a_flat_set_that_hangs_stores_no_page_of_later_content(config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], config) as engine:
        engine.fill(1)
        values = [engine.host().get_data_page(n * PAGE_TOKENS, flat=True) for n in range(4)]
        hashes = [f"{n:064x}" for n in range(4)]
        with hanging(engine, "batch_set") as store:
            assert not engine.storage.batch_set(hashes, values)
            for value in values:
                value.fill_(7)
            store.end()

        assert not engine.storage.batch_exists(hashes)


def test_headers_of_overdue_calls_are_not_used_again(config: dict[str, Any]) -> None:
    """The next call for the same host pages uses other memory for the headers."""
    with Engine(
        [PoolPlan()], {**config, "adapter": {"timeout_s": 0.5, "parallelism": 8}}
    ) as engine:
        engine.fill(1)
        storage, tokens = engine.storage, range(8 * PAGE_TOKENS)
        indices = engine.host().alloc(len(tokens))
        seen: list[int] = []
        batch_set = storage._storage.batch_set

        def watched(space: Any, hashes: Any, pages: Any) -> list[bool]:
            seen.extend(page.addresses[0][0] for page in pages)
            stored: list[bool] = batch_set(space, hashes, pages)
            return stored

        storage._storage.batch_set = watched
        with hanging(engine, "batch_set") as store:
            for turn in range(2):
                hashes = [f"{turn * 100 + n:064x}" for n in range(8)]
                assert [False] * 8 == storage.batch_set_v1(hashes, indices)
            store.end()
            wait_until(lambda: len(seen) == 16)

        assert 16 == len(set(seen))


@pytest.fixture
def always(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the config of a store that may access SGLang's memory at any time."""
    unclaimed = replace(FileStorage.capabilities, revocable=False)
    monkeypatch.setattr(FileStorage, "capabilities", unclaimed)
    return {**config, "adapter": {"timeout_s": 0.3, "lend_memory": "always"}}


def test_always_lends_sglangs_memory_to_every_store(always: dict[str, Any]) -> None:
    with Engine([PoolPlan()], always) as engine:
        assert _is_lent(engine)
        assert 8 == engine.read(TOKENS).pages


def test_always_registers_sglangs_memory_with_the_store(
    always: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []

    def register(_: FileStorage, buffer: Any) -> None:
        registered.extend(address for address, _ in Page(buffer).addresses)

    monkeypatch.setattr(FileStorage, "register_buffer", register)
    with Engine([PoolPlan()], always) as engine:
        assert {tensor.data_ptr() for tensor in tensors_of(engine.host())} <= set(registered)


def test_always_waits_for_a_get_that_hangs(always: dict[str, Any]) -> None:
    with Engine([PoolPlan()], always) as engine, ThreadPoolExecutor(1) as thread:
        engine.fill(1)
        written = engine.write(TOKENS)
        indices = engine.host().alloc(8 * PAGE_TOKENS)
        with hanging(engine, "batch_get") as store:
            getting = thread.submit(engine.storage.batch_get_v1, written.hashes, indices)
            with pytest.raises(TimeoutError):
                getting.result(1)
            store.end()

            assert [True] * 8 == getting.result()
        assert [True] * 8 == engine.storage.batch_get_v1(written.hashes, indices)


def test_always_waits_for_a_set_that_hangs(always: dict[str, Any]) -> None:
    with Engine([PoolPlan()], always) as engine, ThreadPoolExecutor(1) as thread:
        engine.fill(1)
        with hanging(engine, "batch_set") as store:
            writing = thread.submit(engine.write, TOKENS)
            with pytest.raises(TimeoutError):
                writing.result(1)
            store.end()

            assert 8 == writing.result().pages
        assert writing.result().held == engine.read(TOKENS).held
