"""Layouts and key spaces of objects, without LMCache."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from event_streams import past
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, space
from servers import free_port, wait_until
from spans import Spans

from hicache_storage import Page
from hicache_storage.errors import ConfigError, StorageClosed, StorageUnavailable
from hicache_storage.events.publisher import SENT
from hicache_storage.integrations.lmcache import _attachment
from hicache_storage.integrations.lmcache._attachment import Attachment, Session
from hicache_storage.integrations.lmcache._engine import KeyFields, ListedObject
from hicache_storage.integrations.lmcache._identity import Identity, page_hash
from hicache_storage.integrations.lmcache._listing import list_objects
from hicache_storage.integrations.lmcache._object_layouts import Layout, Layouts, UnknownLayoutError
from hicache_storage.integrations.lmcache._settings import AdapterSettings
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Transfer


@dataclass(frozen=True)
class Dtype:
    """A data type that prints as torch's types do."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16, U8 = Dtype("bfloat16", 2), Dtype("uint8", 1)


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes = b"h" * 32
    model_name: str = "org/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Desc:
    shapes: Sequence[Sequence[int]] = ((2, 3, 16, 64),)
    dtypes: Sequence[Any] = (BF16,)


@dataclass(frozen=True)
class Memory:
    desc: Desc = field(default_factory=Desc)
    nbytes: int = 2 * 3 * 16 * 64 * 2
    byte_array: Any = b""
    parts: bool = True

    @property
    def meta(self) -> Any:
        return SimpleNamespace(shapes=self.desc.shapes if self.parts else None)

    def get_shape(self) -> Sequence[int]:
        return self.desc.shapes[0]

    def get_dtype(self) -> Any:
        return self.desc.dtypes[0]

    def get_size(self) -> int:
        return self.nbytes

    def get_shapes(self) -> Sequence[Sequence[int]]:
        return self.desc.shapes

    def get_dtypes(self) -> Sequence[Any]:
        return self.desc.dtypes


class HalfSize:
    """A serde that makes one byte of each two-byte element."""

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        (shape,) = layout_desc.shapes
        return math.prod(shape)

    def close(self) -> None: ...


IDENTITY = Identity(revision="main", tenant="", server="")


class TestLayouts:
    def test_an_object_and_a_lookup_of_it_have_one_layout(self) -> None:
        layouts = Layouts("")

        assert layouts.of_object(Key(), Memory()) == layouts.of_lookup(Key(), {0: Desc()})

    @pytest.mark.parametrize("hints", [{}, {0: Desc((), ())}, {1: Desc()}])
    def test_a_lookup_without_a_hint_has_the_layout_of_the_last_object(
        self, hints: dict[int, Desc]
    ) -> None:
        layouts = Layouts("")
        assert layouts.of_lookup(Key(), hints) is None
        layout = layouts.of_object(Key(), Memory())

        assert layout is layouts.of_lookup(replace(Key(), chunk_hash=b"x" * 32), hints)
        assert layouts.of_lookup(replace(Key(), kv_rank=0x02010201), hints) is None

    def test_an_object_without_parts_is_one_part(self) -> None:
        layouts = Layouts("")

        assert layouts.of_object(Key(), Memory(parts=False)) == layouts.of_object(Key(), Memory())

    def test_bytes_have_the_stated_type(self) -> None:
        memory = Memory(Desc(dtypes=(U8,)), 2 * 3 * 16 * 64)

        assert Layouts("float8_e5m2").of_object(Key(), memory).dtype == "float8_e5m2"
        with pytest.raises(UnknownLayoutError, match="kv_dtype"):
            Layouts("").of_object(Key(), memory)

    def test_a_size_that_does_not_fit_the_layout_is_refused(self) -> None:
        with pytest.raises(UnknownLayoutError, match="whose size varies"):
            Layouts("").of_object(Key(), Memory(nbytes=100))

    def test_a_row_of_bytes_is_refused_unless_it_is_stated(self) -> None:
        row = Memory(Desc(((64,),), (U8,)), 64)

        with pytest.raises(UnknownLayoutError, match="serde"):
            Layouts("float8_e4m3fn").of_object(Key(), row)
        assert Layouts("uint8").of_object(Key(), row).nbytes == 64

    def test_the_parts_of_a_hybrid_object_are_all_in_its_text(self) -> None:
        desc = Desc(((2, 3, 16, 64), (1, 2, 16, 8)), (BF16, Dtype("float32", 4)))
        layout = Layouts("").of_lookup(Key(), {0: desc})

        assert layout is not None
        assert "2x3x16x64:bfloat16,1x2x16x8:float32" == layout.text
        assert ("bfloat16+float32", 16, 5) == (layout.dtype, layout.tokens, layout.layers)
        assert not layout.is_latent

    def test_a_latent_layout_has_no_heads(self) -> None:
        for shape in ((3, 16, 64), (1, 3, 16, 64)):
            layout = Layouts("").of_lookup(Key(), {0: Desc((shape,))})
            assert layout is not None
            assert layout.is_latent
            assert IDENTITY.space(Key(), layout).shard.heads is None


class TestSerde:
    def test_an_object_gets_the_hinted_layout_of_its_size(self) -> None:
        layouts = Layouts("", {"type": "fp8"}, HalfSize())
        memory = Memory(Desc(((6144,),), (U8,)), 6144)
        with pytest.raises(UnknownLayoutError, match="0 of the layouts"):
            layouts.of_object(Key(), memory)
        layout = layouts.of_lookup(Key(), {0: Desc()})

        assert layout is layouts.of_object(Key(), memory)
        assert layout is not None
        assert layout.text.startswith("2x3x16x64:bfloat16;serde=fp8-")

    def test_two_layouts_of_one_size_are_not_guessed_between(self) -> None:
        layouts = Layouts("", {"type": "fp8"}, HalfSize())
        layouts.of_lookup(Key(), {0: Desc()})
        layouts.of_lookup(Key(), {0: Desc(((2, 3, 64, 16),))})

        with pytest.raises(UnknownLayoutError, match="2 of the layouts"):
            layouts.of_object(Key(), Memory(Desc(((6144,),), (U8,)), 6144))

    def test_every_field_of_a_serde_is_in_the_text(self) -> None:
        fields = ({"type": "fp8"}, {"type": "fp8", "fp8_dtype": "float8_e5m2"})
        texts = [Layouts("", serde, HalfSize()).of_lookup(Key(), {0: Desc()}) for serde in fields]

        assert texts[0] != texts[1]

    def test_a_serde_without_a_type_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="type"):
            Layouts("", {"name": "fp8"}, HalfSize())


class TestIdentity:
    def test_every_property_gives_another_key_space(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        keys = [
            Key(),
            replace(Key(), model_name="other"),
            replace(Key(), kv_rank=0x08010801),
            replace(Key(), object_group_id=1),
            replace(Key(), cache_salt="salt"),
        ]
        identities = [
            IDENTITY,
            replace(IDENTITY, revision="step-2"),
            replace(IDENTITY, tenant="t"),
            replace(IDENTITY, server="0/2"),
            replace(IDENTITY, server="1/2"),
        ]
        spaces = [each.space(key, layout).id for key in keys for each in identities]

        assert len(spaces) == len(set(spaces))

    def test_a_tenant_and_a_salt_are_not_confused(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        pairs = [("", ""), ("a", ""), ("", "a"), ("a@b", ""), ("a", "b"), ("a@", "b")]
        tenants = [
            replace(IDENTITY, tenant=tenant).space(replace(Key(), cache_salt=salt), layout).tenant
            for tenant, salt in pairs
        ]

        assert len(pairs) == len(set(tenants))

    def test_the_rank_is_the_shards_place(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        space = IDENTITY.space(replace(Key(), kv_rank=0x08030803), layout)

        assert ((0, 3), (3, 4)) == (space.shard.layers, space.shard.heads)
        assert "rank=0x08030803" in space.layout

    @pytest.mark.parametrize("nbytes", [4, 8, 15, 65])
    def test_a_hash_of_another_length_is_no_page_hash(self, nbytes: int) -> None:
        with pytest.raises(UnknownLayoutError, match="--hash-algorithm"):
            page_hash(replace(Key(), chunk_hash=b"x" * nbytes))


# Listings of objects in a store, without LMCache.

KEY = KeyFields("org/model", 0x02010201, 3, "salt")
LAYOUT = Layout(parts=(((2, 3, 16, 64), "bfloat16"),), nbytes=64)
TEAM = Identity(revision="main", tenant="team", server="")


class ChunkKey:
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
    identity: Identity = TEAM,
    layout: Layout = LAYOUT,
) -> None:
    keys = [ChunkKey(fields, number) for number in numbers]
    space = identity.space(keys[0], layout)
    _save_pages(store, space, [key.chunk_hash.hex() for key in keys])


def _save_pages(store: PageStore, space: KeySpace, hashes: list[str]) -> None:
    store.open_space(space)
    pages = [Page(bytearray(space.page_nbytes)) for _ in hashes]
    store.save([Transfer(space, hashes, pages)])


def _list(
    store: PageStore,
    *,
    identity: Identity = TEAM,
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
        space = TEAM.space(ChunkKey(KEY, 1), LAYOUT)
        store.delete(space, [ChunkKey(KEY, 1).chunk_hash.hex()])
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
        other = replace(TEAM.space(ChunkKey(KEY, 1), LAYOUT), layout="page_first")
        _save_pages(store, other, ["ab" * 32])
        found, _ = _list(store)
    assert [1] == _numbers(found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_size": 0}, "positive"),
        ({"cursor": "x"}, "not a cursor"),
        ({"cursor": ""}, "not a cursor"),
    ],
)
def test_a_wrong_argument_is_refused(wrong: dict[str, Any], message: str) -> None:
    with _store() as store, pytest.raises(ValueError, match=message):
        _list(store, **wrong)


# `adapter_params`, without LMCache.

PARAMS: dict[str, Any] = {"backend": "redis", "config": {"url": "redis://x"}, "revision": "main"}


def test_the_backends_fields_are_under_config() -> None:
    assert {"url": "redis://x"} == AdapterSettings.of(PARAMS).backend_fields()


def test_an_empty_revision_may_be_stated() -> None:
    assert AdapterSettings.of({**PARAMS, "revision": ""}).revision == ""


def test_a_missing_revision_is_explained() -> None:
    with pytest.raises(ConfigError, match="LMCache's keys do not identify the weights"):
        AdapterSettings.of({"backend": "redis"})


@pytest.mark.parametrize("label", ["1/1", "2/2", "a/b", "0", "-1/2", "0/2/3", "00/2"])
def test_a_server_label_is_a_place_among_servers(label: str) -> None:
    with pytest.raises(ConfigError, match="server i"):
        AdapterSettings.of({**PARAMS, "server": label})


def test_releases_and_platforms_have_revisions_of_their_own() -> None:
    def revision(version: str = "0.5.6", **fields: Any) -> str:
        return AdapterSettings.of({**PARAMS, "platform": "p", **fields}).labelled_revision(version)

    shared = [revision(v, share_between_releases=True) for v in ("0.5.6", "0.5.7")]
    others = [revision("0.5.7"), revision(platform="rocm-gfx942"), revision(revision="2"), *shared]

    assert revision() == revision("0.5.6+cu129")
    assert revision() not in others
    assert 1 == len(set(shared))
    assert 4 == len(set(others))


def test_a_server_names_its_own_platform() -> None:
    found = AdapterSettings.of(PARAMS).labelled_revision("0.5.6")

    assert found.startswith("main;lmcache=0.5.6;platform=")
    assert found.rpartition("=")[2]


def test_secrets_are_in_no_representation() -> None:
    settings = AdapterSettings.of({**PARAMS, "config": {"url": "redis://:secret@x"}})

    assert "secret" not in repr(settings)


class TestTtls:
    def test_the_defaults_fit_lmcaches(self) -> None:
        AdapterSettings.of(PARAMS).check_ttls()

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"store_timeout_s": 151}, "store_timeout_s.*151 s.*read TTL of 300 s"),
            ({"load_timeout_s": 301}, "load_timeout_s.*301 s.*write TTL of 600 s"),
            ({"l1_read_ttl_s": 19}, "store_timeout_s.*10 s"),
        ],
    )
    def test_deadlines_near_a_ttl_are_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            AdapterSettings.of({**PARAMS, **fields}).check_ttls()


# The store of an adapter, without LMCache.

SPACE = space()


@contextmanager
def session(**params: Any) -> Generator[Session]:
    """Yield a session over a storage in memory. LMCache's own types are not needed without a serde."""
    settings = AdapterSettings.of({"backend": "memory", "revision": "", **params})
    engine = cast("Any", SimpleNamespace(version="0.5.6"))
    opened = Session(settings, engine, None, lambda _session, _kind: None)
    try:
        opened.store.open_space(SPACE)
        yield opened
    finally:
        opened.close()


def test_tracing_makes_spans_of_the_adapters_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with session(tracing=True) as opened:
        opened.store.present(SPACE, [hash_of(1)])

    attributes = spans.only("hicache.present").attributes or {}
    assert ("lmcache", "memory") == (attributes["hicache.engine"], attributes["hicache.backend"])


def test_there_are_no_spans_without_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans.of_process(monkeypatch)

    with session() as opened:
        opened.store.present(SPACE, [hash_of(1)])

    assert [] == spans.named("hicache.present")


def test_objects_of_the_first_rank_and_group_have_events() -> None:
    replay = f"tcp://127.0.0.1:{free_port()}"
    events = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "bind": True,
        "replay_endpoint": replay,
    }
    first = replace(space(), pool="object_group_0", shard=Shard(layers=(0, 1), heads=(0, 1)))
    second = replace(first, shard=Shard(layers=(0, 1), heads=(1, 2)))
    windowed = replace(first, pool="object_group_1")

    with session(events=events) as opened, session(events=events):  # as at a new attach
        for number, stored in enumerate((second, windowed, first)):
            opened.store.open_space(stored)
            page = blank(stored.page_nbytes)
            opened.store.save([Transfer(stored, [hash_of(number)], [page])])
        wait_until(lambda: opened.store.stats()[SENT] == 1, 20)
        ((_, (_, published, _)),) = past(replay)

    assert [[int(hash_of(2)[-16:], 16)]] == [event["block_hashes"] for event in published]


def test_memory_that_cannot_be_unregistered_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Any) -> None:
        raise StorageUnavailable("the transfer engine is gone")

    with session() as opened:
        opened._buffer = memoryview(bytearray(1))
        monkeypatch.setattr(opened.store, "unregister_buffer", refuse)

    with pytest.raises(StorageClosed):
        opened.store.storage.stats()


def test_the_failure_of_an_attempt_that_was_given_up_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, gate, tries = threading.Event(), threading.Event(), list[int]()

    def fail(*_: Any) -> Session:
        tries.append(1)
        if len(tries) > 1:
            late.set()
            gate.wait(20)
        raise StorageUnavailable("the old store does not answer")

    monkeypatch.setattr(_attachment, "_REOPEN_S", 0.01)
    monkeypatch.setattr(_attachment, "Session", fail)
    attachment = Attachment(cast("Any", None), None, lambda _session, _kind: None)
    attachment.attach(AdapterSettings.of({"backend": "memory", "revision": ""}))
    assert late.wait(20)
    attachment.detach()
    gate.set()
    wait_until(lambda: "hicache-reopen" not in [one.name for one in threading.enumerate()], 20)

    assert not attachment.failure
