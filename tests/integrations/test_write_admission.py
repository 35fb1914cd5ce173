"""Admission of an engine's writes, and where its sketch is stored."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest
from hicache_backends.memory import MemoryStorage
from job_runners import OTHER, SPACE
from pages import hash_of
from servers import wait_until

from hicache_storage.integrations._write_admission import WriteAdmission
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.admission import AdmissionSettings

PAGES = [hash_of(number) for number in range(3)]
SECOND_USE = AdmissionSettings(second_use=True, remembered_pages=1000)


def is_restored(admission: WriteAdmission) -> bool:
    sketches = admission._sketches
    return sketches is not None and sketches._restored


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage.from_config({})


@pytest.fixture
def store(storage: MemoryStorage) -> Generator[PageStore]:
    with PageStore(storage) as store:
        yield store


def test_by_default_all_pages_are_written_and_nothing_is_kept(
    storage: MemoryStorage, store: PageStore
) -> None:
    admission = WriteAdmission(store, AdmissionSettings())
    admission.start(SPACE)

    assert not admission.is_enabled
    assert [True] * 3 == admission.admit(PAGES, 4096, "kv")
    assert {} == admission.stats()
    assert admission.close(0)
    assert [] == list(storage.spaces())


def test_a_rate_alone_needs_no_place_in_the_store(storage: MemoryStorage, store: PageStore) -> None:
    admission = WriteAdmission(store, AdmissionSettings(write_nbytes_per_s=1))
    admission.start(SPACE)

    assert admission.close(0)
    assert [] == list(storage.spaces())


def test_the_first_owner_names_the_sketch(storage: MemoryStorage, store: PageStore) -> None:
    admission = WriteAdmission(store, SECOND_USE)
    admission.start(SPACE)
    admission.start(OTHER)
    admission.admit(PAGES, 4096, "kv")
    assert admission.close(20)

    (space,) = storage.spaces()
    assert ("admission", SPACE.model, SPACE.shard) == (space.pool, space.model, space.shard)
    assert 1 == len(list(storage.scan(space)))


def test_the_next_process_remembers(store: PageStore) -> None:
    for expected in (False, True):
        admission = WriteAdmission(store, SECOND_USE)
        admission.start(SPACE)
        wait_until(partial(is_restored, admission))

        assert [expected] * 3 == admission.admit(PAGES, 4096, "kv")
        assert admission.close(20)


def test_a_closed_admission_starts_no_more(storage: MemoryStorage, store: PageStore) -> None:
    admission = WriteAdmission(store, SECOND_USE)
    assert admission.close(0)
    admission.start(SPACE)

    assert admission.close(0)
    assert [] == list(storage.spaces())
