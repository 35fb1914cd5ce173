from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import pytest
from pages import blank, hash_of, page, space
from processes import in_a_fork

from hicache_storage.errors import StorageClosed, StorageUnavailable, UnsupportedOperation
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import (
    LIMITS,
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
    describe,
)


class DictStorage(HiCacheStorage):
    """A storage with only the five methods, for the defaults of the others."""

    capabilities = Capabilities(retention=Retention.UNTIL_DELETED)

    def __init__(self) -> None:
        self.pages: dict[tuple[str, str], bytes] = {}
        self.deleted: list[list[str]] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(**config)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return [(space.id, page_hash) in self.pages for page_hash in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        found = self.batch_exists(space, hashes)
        for hit, page_hash, target in zip(found, hashes, pages, strict=True):
            if hit:
                target.copy_from(self.pages[space.id, page_hash])
        return found

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        for page_hash, source in zip(hashes, pages, strict=True):
            self.pages[space.id, page_hash] = source.tobytes()
        return [True] * len(hashes)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        self.deleted.append(list(hashes))
        for page_hash in hashes:
            self.pages.pop((space.id, page_hash), None)
        return [True] * len(hashes)


class ScannedStorage(DictStorage):
    """A storage that lists its pages, and accepts batches of three."""

    capabilities = Capabilities(enumerable=True, max_batch=3)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        for (space_id, page_hash), data in list(self.pages.items()):
            if space_id == space.id:
                yield PageInfo(page_hash, len(data))


class LimitedStorage(DictStorage):
    capabilities = Capabilities(
        durability=Durability.CRASH,
        scatter_gather=False,
        parallelism=4,
        max_batch=64,
        max_page_nbytes=1 << 20,
        max_batch_nbytes=4 << 20,
    )


# --- the five methods ----------------------------------------------------------------------------


def test_five_methods_make_a_storage() -> None:
    hashes, target = [hash_of(1), hash_of(2)], blank()
    with DictStorage.from_config({}) as storage:
        storage.open_space(space())
        assert [True] == storage.batch_set(space(), hashes[:1], [page()])
        assert [True, False] == storage.batch_exists(space(), hashes)
        assert [True, False] == storage.batch_get(space(), hashes, [target, blank()])

    assert page().tobytes() == target.tobytes()


@pytest.mark.parametrize(
    "missing", ["from_config", "batch_exists", "batch_get", "batch_set", "batch_delete"]
)
def test_a_class_that_lacks_one_of_them_is_no_storage(missing: str) -> None:
    incomplete: Any = type(
        "Incomplete", (DictStorage,), {missing: getattr(HiCacheStorage, missing)}
    )
    with pytest.raises(TypeError, match=missing):
        incomplete()


# --- defaults ------------------------------------------------------------------------------------


def test_a_storage_without_listings_raises_unsupported() -> None:
    with DictStorage() as storage:
        for refused in (storage.spaces, lambda: storage.scan(space())):
            with pytest.raises(UnsupportedOperation, match="DictStorage does not list its"):
                refused()


def test_a_storage_that_lists_nothing_clears_nothing() -> None:
    with DictStorage() as storage:
        storage.batch_set(space(), [hash_of(1)], [page()])

        with pytest.raises(UnsupportedOperation):
            storage.clear(space())
        assert [True] == storage.batch_exists(space(), [hash_of(1)])


@pytest.mark.parametrize("pages", [0, 1, 3, 4, 7])
def test_clear_deletes_all_that_scan_finds_in_pieces(pages: int) -> None:
    hashes = [hash_of(number) for number in range(pages)]
    with ScannedStorage() as storage:
        storage.batch_set(space(), hashes, [page()] * pages)

        assert pages == storage.clear(space())
        assert [False] * pages == storage.batch_exists(space(), hashes)
        assert hashes == [page_hash for piece in storage.deleted for page_hash in piece]
        assert max(map(len, storage.deleted), default=0) <= 3


def test_clear_leaves_other_key_spaces_alone() -> None:
    other = space(pool="draft")
    with ScannedStorage() as storage:
        for key_space in (space(), other):
            storage.batch_set(key_space, [hash_of(1)], [page()])

        assert 1 == storage.clear(space())
        assert [True] == storage.batch_exists(other, [hash_of(1)])


class Stubborn(ScannedStorage):
    """A storage whose pages survive their first deletions."""

    def __init__(self, stays: dict[str, int]) -> None:
        super().__init__()
        self.stays = stays

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        kept = [page_hash for page_hash in hashes if self.stays.get(page_hash, 0) > 0]
        for page_hash in kept:
            self.stays[page_hash] -= 1
        super().batch_delete(space, [page_hash for page_hash in hashes if page_hash not in kept])
        return [page_hash not in kept for page_hash in hashes]


def test_clear_tries_what_stays_a_second_time() -> None:
    with Stubborn({hash_of(2): 1, hash_of(6): 1}) as storage:
        storage.batch_set(space(), [hash_of(n) for n in range(7)], [page()] * 7)

        assert storage.clear(space()) == 7
        assert not storage.pages


def test_a_partial_clear_raises() -> None:
    """Every page that can be removed is removed, even after a page that can't be."""
    stays = [hash_of(n) for n in (0, 1, 2, 3)]
    with Stubborn(dict.fromkeys(stays, 2)) as storage:
        storage.batch_set(space(), [hash_of(n) for n in range(9)], [page()] * 9)

        with pytest.raises(
            StorageUnavailable, match="4 of 9 pages of pool 'kv' could not be removed"
        ):
            storage.clear(space())
        assert {page_hash for _, page_hash in storage.pages} == set(stays)
        assert storage.clear(space()) == 4


def test_stats_are_unknown_by_default() -> None:
    with DictStorage() as storage:
        assert StorageStats() == storage.stats()


def test_registering_a_buffer_has_no_effect_by_default() -> None:
    buffer = memoryview(bytearray(16))
    with DictStorage() as storage:
        storage.register_buffer(buffer)
        storage.unregister_buffer(buffer)

    assert 16 == buffer.nbytes


# --- limits (KV-903) -----------------------------------------------------------------------------


def test_a_key_space_at_the_page_limit_is_opened() -> None:
    with LimitedStorage() as storage:
        storage.open_space(space(page_nbytes=(1 << 20) - 128, frame_nbytes=128))


def test_a_key_space_past_the_page_limit_is_refused_with_both_sizes() -> None:
    with LimitedStorage() as storage:
        with pytest.raises(
            UnsupportedOperation, match=r"up to 1 MiB, .* have 1.00 MiB \(1,048,577 bytes\)"
        ) as e:
            storage.open_space(space(page_nbytes=(1 << 20) - 127, frame_nbytes=128))
        assert e.match("pool 'kv' of 'meta-llama/Llama-3.1-8B-Instruct'")


# --- the end (KV-301) ----------------------------------------------------------------------------

CALLS: dict[str, Callable[[HiCacheStorage], object]] = {
    "batch_exists": lambda storage: storage.batch_exists(space(), []),
    "batch_get": lambda storage: storage.batch_get(space(), [], []),
    "batch_set": lambda storage: storage.batch_set(space(), [], []),
    "batch_delete": lambda storage: storage.batch_delete(space(), []),
    "open_space": lambda storage: storage.open_space(space()),
    "spaces": lambda storage: storage.spaces(),
    "scan": lambda storage: storage.scan(space()),
    "faults": lambda storage: storage.faults(space()),
    "unreadable_spaces": lambda storage: storage.unreadable_spaces(),
    "remove_space": lambda storage: storage.remove_space("0" * 32),
    "page_times": lambda storage: storage.page_times(space(), []),
    "clear": lambda storage: storage.clear(space()),
    "diagnose": lambda storage: storage.diagnose(),
    "register_buffer": lambda storage: storage.register_buffer(b"x"),
    "unregister_buffer": lambda storage: storage.unregister_buffer(b"x"),
    "parts": lambda storage: storage.parts(),
    "page_shares": lambda storage: storage.page_shares(),
    "page_parts": lambda storage: storage.page_parts(space(), []),
    "stats": lambda storage: storage.stats(),
    "ensure_open": lambda storage: storage.ensure_open(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_storage_refuses_every_call(call: Callable[[HiCacheStorage], object]) -> None:
    storage = DictStorage()
    storage.close()
    storage.close()

    with pytest.raises(StorageClosed, match="this DictStorage was closed"):
        call(storage)


def test_every_method_is_in_the_list_above() -> None:
    methods = {name for name in vars(HiCacheStorage) if callable(getattr(HiCacheStorage, name))}
    public = {name for name in methods if not name.startswith("_")}

    of_class = {"from_config", "open_read_only", "would_claim", "would_create"}
    assert public - of_class - {"close", "narrow"} == set(CALLS)


def test_leaving_the_context_closes_also_on_an_error() -> None:
    storage = DictStorage()
    with contextlib.suppress(KeyError), storage as entered:
        assert entered is storage
        raise KeyError

    with pytest.raises(StorageClosed):
        storage.ensure_open()


# --- capabilities --------------------------------------------------------------------------------

CLAIMS: dict[str, Any] = {
    "durability": Durability.PROCESS,
    "parallelism": 1,
    "max_batch": 1,
    "max_page_nbytes": 4096,
    "max_batch_nbytes": 4096,
    "alignment": 512,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_instance_may_claim_less(claim: str) -> None:
    storage, untouched = LimitedStorage(), LimitedStorage()
    storage.narrow(**{claim: CLAIMS[claim]})

    expected = dataclasses.replace(LimitedStorage.capabilities, **{claim: CLAIMS[claim]})
    assert expected == storage.capabilities
    assert LimitedStorage.capabilities == untouched.capabilities


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("retention", Retention.UNTIL_PRESSURE),
        ("durability", Durability.POWER),
        ("shared", True),
        ("enumerable", True),
        ("scatter_gather", True),
        ("max_batch", 65),
        ("max_batch", None),
        ("max_page_nbytes", (1 << 20) + 1),
        ("max_page_nbytes", None),
        ("max_batch_nbytes", (4 << 20) + 1),
        ("max_batch_nbytes", None),
    ],
)
def test_an_instance_may_not_claim_more(claim: str, value: object) -> None:
    storage = LimitedStorage()

    with pytest.raises(ValueError, match=f"may not widen {claim}"):
        storage.narrow(**{claim: value})
    assert LimitedStorage.capabilities == storage.capabilities


def test_narrowed_claims_may_be_narrowed_again() -> None:
    storage = LimitedStorage()
    storage.narrow(max_batch=8)
    storage.narrow(durability=Durability.PROCESS)

    assert (8, Durability.PROCESS) == (
        storage.capabilities.max_batch,
        storage.capabilities.durability,
    )


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(TypeError, match="speed"):
        LimitedStorage().narrow(speed=11)


@pytest.mark.parametrize("name", ["alignment", "parallelism", *LIMITS])
def test_a_limit_of_nothing_cannot_be_claimed(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} 0"):
        Capabilities(**nothing)


@pytest.mark.parametrize(
    ("limits", "fitting"),
    [
        (Capabilities(), 100),
        (Capabilities(max_batch=7), 7),
        (Capabilities(max_batch_nbytes=4096), 4),
        (Capabilities(max_batch_nbytes=4095), 3),
        (Capabilities(max_batch=2, max_batch_nbytes=4096), 2),
        (Capabilities(max_batch_nbytes=1023), 1),
    ],
)
def test_a_batch_of_pages_fits_both_limits(limits: Capabilities, fitting: int) -> None:
    assert fitting == limits.fitting_pages(100, page_nbytes=1024)


def test_a_new_backend_claims_nothing_that_it_must_prove() -> None:
    claims = Capabilities()

    assert (Retention.BEST_EFFORT, Durability.PROCESS) == (claims.retention, claims.durability)
    assert not claims.shared
    assert not claims.enumerable


def test_capabilities_are_described_in_single_words() -> None:
    told = describe(LimitedStorage.capabilities)

    assert {
        "retention": "best-effort",
        "durability": "crash",
        "shared": "no",
        "enumerable": "no",
        "overwrites": "yes",
        "scatter_gather": "no",
        "alignment": "1",
        "parallelism": "4",
        "max_batch": "64",
        "max_page_nbytes": "1048576",
        "max_batch_nbytes": "4194304",
        "bounded": "no",
        "revocable": "no",
        "keeps_given": "no",
    } == told
    assert "unlimited" == describe(Capabilities())["max_batch"]


# --- forked children -----------------------------------------------------------------------------


def _asked(storage: HiCacheStorage) -> str:
    try:
        return str(storage.batch_exists(space(), [hash_of(1)]))
    except StorageClosed as refusal:
        return f"StorageClosed: {refusal}"


def test_a_forked_child_is_refused_by_default() -> None:
    storage = DictStorage()
    message = (
        f"this DictStorage was opened by process {os.getpid()}, from which this one was forked"
    )

    assert f"StorageClosed: {message}: open a new one here" == in_a_fork(lambda: _asked(storage))
    assert _asked(storage) == "[False]"


def test_a_forked_child_is_served_where_the_class_allows_it() -> None:
    class Reopening(DictStorage):
        usable_after_fork = True

    storage = Reopening()

    assert in_a_fork(lambda: _asked(storage)) == "[False]"


def test_a_storage_that_is_sent_to_another_process_was_opened_there() -> None:
    """A spawned worker unpickles the storage, so it shares nothing with the sender."""
    data = pickle.dumps(DictStorage())

    def tell() -> str:
        return _asked(pickle.loads(data))  # noqa: S301 - the test pickled it

    assert in_a_fork(tell) == "[False]"


def test_a_class_that_makes_its_objects_itself_is_asked_as_any() -> None:
    class Singleton(DictStorage):
        def __new__(cls) -> Self:
            return object.__new__(cls)

    assert _asked(Singleton()) == "[False]"


def test_a_revocable_storage_scatters_and_gathers() -> None:
    with pytest.raises(ValueError, match="scatter_gather"):
        Capabilities(revocable=True, scatter_gather=False)
