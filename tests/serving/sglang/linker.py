"""Our linker in a real server, in place of HiCache: restarts, damage, and faults of the store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.answers import Asked, Comparison, ask_all, compare
from serving.faults import Fault, of, strike
from serving.models import prompt
from serving.record import note
from serving.sglang.conftest import ask_cold
from serving.sglang.server import PAGE, VERSION, LinkedServer, SGLangServer, alone, ours
from serving.stores import KEEPING, Store, opened, small_disk

_SMALL_TOKENS = 2560
"""The device pool holds eight prompts."""
_SHORT = 300
_LONG = 600
_FEW = 8
_SOME = 32
_DISK = "64m"
_EACH_RANK_HAS_A_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
STALL_LIMIT_S = 8.0
"""The scheduler itself waits for loads, of which each may take 1 s, until the breaker opens."""


def linked(directory: Path, store: Store, *options: str, **fields: object) -> LinkedServer:
    """Return a server over a store."""
    config = ours(store.backend, store.config, fields)
    variables = _EACH_RANK_HAS_A_CORE if options else None
    return LinkedServer(directory, config, *options, tokens=_SMALL_TOKENS * 2, variables=variables)


def small(directory: Path, store: Store) -> LinkedServer:
    """Return a server whose device pool holds few of the prompts."""
    return LinkedServer(directory, ours(store.backend, store.config), tokens=_SMALL_TOKENS)


def computed(directory: Path, count: int, length: int) -> Asked:
    """Return prompts with the answers of a server that has neither a linker nor HiCache."""
    with alone(), LinkedServer(directory) as server:
        return Asked.of(server.ask, [prompt(number, length) for number in range(count)])


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return computed(tmp_path_factory.mktemp("few"), _FEW, _LONG)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return computed(tmp_path_factory.mktemp("some"), _SOME, _SHORT)


def seen_by(server: SGLangServer, asked: Asked, event: str, **facts: float | str) -> Comparison:
    """Ask all prompts with a cold device pool, and note what came from where."""
    seen = ask_cold(server, asked)
    note(VERSION, "file", f"{server.plug_point}{event}", seen, **facts)
    assert seen.is_equal
    return seen


@pytest.mark.long
def test_a_restarted_server_takes_the_tokens_from_the_store(few: Asked, tmp_path: Path) -> None:
    whole = few.page_tokens(PAGE)
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        linked(tmp_path / "server", store) as server,
    ):
        assert not seen_by(server, few, "computed").cached_tokens
        server.settle()
        server.end()
        server.start()
        assert seen_by(server, few, "restart", of=whole).cached_tokens == whole
        pages = store.damage()
        assert pages
        seen = seen_by(server, few, "a bit of every page is flipped", pages=pages)
        assert not seen.cached_tokens
        assert seen_by(server, few, "and asked again: healed").cached_tokens == whole


@pytest.mark.long
def test_logprobs_are_those_of_the_own_cache(few: Asked, tmp_path: Path) -> None:
    """A prompt rounds otherwise in a batch: the reference is a prefix that SGLang had kept itself."""
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        linked(tmp_path / "server", store) as server,
    ):
        ask_all(server.ask, few.prompts, clients=1)
        kept = ask_all(server.ask, few.prompts, clients=1)
        server.settle()
        server.flush()
        loaded = ask_all(server.ask, few.prompts, clients=1)
        seen = compare(loaded, kept)
        note(VERSION, "file", "linker, logprobs, beside those of SGLang's own prefix cache", seen)
        assert seen.is_equal
        assert seen.cached_tokens == few.page_tokens(PAGE)
        assert [answer.logprobs for answer in loaded] == [answer.logprobs for answer in kept]


@pytest.mark.long
def test_wrong_bytes_are_seen(few: Asked, tmp_path: Path) -> None:
    """The control: without checksums damaged pages are loaded, and answers differ."""
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        linked(tmp_path / "server", store, checksum="none") as server,
    ):
        ask_cold(server, few)
        server.settle()
        store.damage()
        seen = ask_cold(server, few)
        note(VERSION, "file", "linker, the same without checksums", seen)
        assert seen.cached_tokens == few.page_tokens(PAGE)
        assert seen.different == seen.answers


@pytest.mark.long
def test_a_linker_and_hicache_share_pages(few: Asked, tmp_path: Path) -> None:
    whole = few.page_tokens(PAGE)
    with alone(), opened("file", tmp_path / "store") as store:
        with SGLangServer(tmp_path / "hicache", ours(store.backend, store.config)) as server:
            assert ask_cold(server, few).is_equal
            server.settle()
        with linked(tmp_path / "linked", store) as server:
            assert seen_by(server, few, "pages that HiCache stored").cached_tokens == whole


@pytest.mark.long
def test_two_ranks(few: Asked, tmp_path: Path) -> None:
    """Each rank has its own heads. Without the pages of one of them, both compute."""
    whole = few.page_tokens(PAGE)
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        linked(tmp_path / "server", store, "--tp-size", "2") as server,
    ):
        assert not seen_by(server, few, "two ranks: computed").cached_tokens
        server.settle()
        server.end()
        server.start()
        assert seen_by(server, few, "two ranks: restart", of=whole).cached_tokens == whole
        with store.open() as storage:
            heads = sorted(storage.spaces(), key=lambda space: str(space.shard))
            assert len(heads) == 2
            assert storage.remove_space(heads[1].id)
        seen = seen_by(server, few, "two ranks: the pages of one are lost")
        assert not seen.cached_tokens


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}: {fault.name}")
        for name in KEEPING
        for fault in of(name)
    ],
)
def test_a_fault(name: str, fault: Fault, some: Asked, tmp_path: Path) -> None:
    with alone(), ExitStack() as stack:
        directory = tmp_path / "store"
        if fault.strike is Store.fill and name == "file":
            directory = stack.enter_context(small_disk(directory, _DISK)).parent
        store = stack.enter_context(opened(name, directory))
        server = stack.enter_context(small(tmp_path / "server", store))
        strike(fault, store, server, some, stall_limit_s=STALL_LIMIT_S)
