"""Listings of objects in a store, without LMCache."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage import Page
from hicache_storage.integrations.lmcache._engine import KeyFields, ListedObject
from hicache_storage.integrations.lmcache._identity import Identity
from hicache_storage.integrations.lmcache._listing import list_objects
from hicache_storage.integrations.lmcache._object_layouts import Layout
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from hicache_storage.keys import KeySpace

KEY = KeyFields("org/model", 0x02010201, 3, "salt")
LAYOUT = Layout(parts=(((2, 3, 16, 64), "bfloat16"),), nbytes=64)
IDENTITY = Identity(revision="main", tenant="team", server="")


class Key:
    """LMCache's key of one chunk."""

    def __init__(self, fields: KeyFields, number: int) -> None:
        self.chunk_hash = number.to_bytes(32, "big")
        self.model_name, self.kv_rank = fields.model_name, fields.kv_rank
        self.object_group_id, self.cache_salt = fields.object_group_id, fields.cache_salt


@contextmanager
def _store() -> Generator[PageStore]:
    with MemoryStorage.from_config({}) as storage, PageStore(storage) as store:
        yield store


def _save(
    store: PageStore,
    numbers: Iterable[int],
    fields: KeyFields = KEY,
    identity: Identity = IDENTITY,
    layout: Layout = LAYOUT,
) -> None:
    keys = [Key(fields, number) for number in numbers]
    space = identity.space(keys[0], layout)
    _save_pages(store, space, [key.chunk_hash.hex() for key in keys])


def _save_pages(store: PageStore, space: KeySpace, hashes: list[str]) -> None:
    store.open_space(space)
    header_nbytes, nbytes = store.frame_nbytes, space.page_nbytes
    pages = [
        FramedPage(memoryview(bytearray(header_nbytes)), Page(bytearray(nbytes))) for _ in hashes
    ]
    store.save([Transfer(space, hashes, pages)])


def _list(
    store: PageStore,
    *,
    identity: Identity = IDENTITY,
    serde: str = "",
    model_name: str | None = None,
    page_size: int = 100,
    cursor: str | None = None,
) -> tuple[list[ListedObject], str | None]:
    return list_objects(
        store, identity, serde, model_name=model_name, page_size=page_size, cursor=cursor
    )


def _numbers(found: list[ListedObject]) -> list[int]:
    return [int(one.page_hash, 16) for one in found]


def test_an_object_has_its_key_and_its_bytes() -> None:
    with _store() as store:
        _save(store, [7])
        (found,), token = _list(store)
    assert (KEY, [7], 64, None) == (found.key, _numbers([found]), found.nbytes, token)


def test_pages_of_a_listing_have_each_object_once() -> None:
    with _store() as store:
        _save(store, range(5))
        _save(store, range(5, 9), replace(KEY, kv_rank=0x02000200))
        pages: list[list[int]] = []
        cursor = None
        while not pages or cursor is not None:
            found, cursor = _list(store, page_size=3, cursor=cursor)
            pages.append(_numbers(found))
    assert [3, 3, 3] == [len(page) for page in pages]
    assert list(range(9)) == sorted(number for page in pages for number in page)


def test_a_cursor_stays_valid_after_its_object_has_gone() -> None:
    with _store() as store:
        _save(store, range(4))
        _, cursor = _list(store, page_size=2)
        space = IDENTITY.space(Key(KEY, 1), LAYOUT)
        store.delete(space, [Key(KEY, 1).chunk_hash.hex()])
        found, _ = _list(store, cursor=cursor)
    assert [2, 3] == _numbers(found)


def test_the_model_is_a_filter() -> None:
    with _store() as store:
        _save(store, [1])
        _save(store, [2], replace(KEY, model_name="org/other"))
        found, _ = _list(store, model_name="org/other")
    assert [2] == _numbers(found)


@pytest.mark.parametrize(
    "identity",
    [
        Identity(revision="step-2", tenant="team", server=""),
        Identity(revision="main", tenant="", server=""),
        Identity(revision="main", tenant="team", server="0/2"),
    ],
)
def test_objects_of_another_identity_are_not_listed(identity: Identity) -> None:
    with _store() as store:
        _save(store, [1])
        assert ([], None) == _list(store, identity=identity)
        _save(store, [2], identity=identity)
        found, _ = _list(store, identity=identity)
    assert [2] == _numbers(found)


def test_objects_of_another_serde_are_not_listed() -> None:
    with _store() as store:
        _save(store, [1])
        _save(store, [2], layout=replace(LAYOUT, serde="fp8-00"))
        found, _ = _list(store, serde="fp8-00")
        assert [2] == _numbers(found)
        found, _ = _list(store)
    assert [1] == _numbers(found)


def test_key_spaces_of_other_programs_are_not_listed() -> None:
    with _store() as store:
        _save(store, [1])
        other = replace(IDENTITY.space(Key(KEY, 1), LAYOUT), layout="page_first")
        _save_pages(store, other, ["ab" * 32])
        found, _ = _list(store)
    assert [1] == _numbers(found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"page_size": 0}, "positive"), ({"cursor": "x"}, "no cursor"), ({"cursor": ""}, "no cursor")],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], message: str) -> None:
    with _store() as store, pytest.raises(ValueError, match=message):
        _list(store, **wrong)
