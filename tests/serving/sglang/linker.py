"""Our linker in a real server, in place of HiCache: restarts, damage, and faults of the store.

The tests of `restart` run here with this module's `server` and `asked`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.answers import Asked, Comparison
from serving.faults import Fault, of, strike
from serving.models import prompt
from serving.record import note
from serving.sglang import restart
from serving.sglang.conftest import ask_cold
from serving.sglang.server import PAGE, VERSION, LinkedServer, SGLangServer, alone, ours, shared
from serving.stores import KEEPING, Store, opened, small_disk

pytestmark = pytest.mark.long
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


def linked(directory: Path, store: Store, *options: str) -> LinkedServer:
    """Return a server over a store."""
    config = ours(store.backend, store.config)
    variables = _EACH_RANK_HAS_A_CORE if options else None
    return LinkedServer(directory, config, *options, tokens=_SMALL_TOKENS * 2, variables=variables)


def small(directory: Path, store: Store) -> LinkedServer:
    """Return a server whose device pool holds few of the prompts."""
    return LinkedServer(directory, ours(store.backend, store.config), tokens=_SMALL_TOKENS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[LinkedServer]:
    """Yield a server for all scenarios that need no other. Each of them attaches its own store."""
    directory: Path = tmp_path_factory.mktemp("server")
    with alone(), LinkedServer(directory, tokens=_SMALL_TOKENS * 2) as server, shared(server):
        yield server


def computed(server: LinkedServer, count: int, length: int) -> Asked:
    """Return prompts with the answers of the server without a linker."""
    server.detach()
    server.flush()
    return Asked.of(server.ask, [prompt(number, length) for number in range(count)])


@pytest.fixture(scope="module")
def asked(server: LinkedServer) -> Asked:
    return computed(server, _FEW, _LONG)


@pytest.fixture(scope="module")
def some(server: LinkedServer) -> Asked:
    return computed(server, _SOME, _SHORT)


def seen_by(server: LinkedServer, asked: Asked, event: str, **facts: float | str) -> Comparison:
    """Ask all prompts with a cold device pool, and note what came from where."""
    seen = ask_cold(server, asked)
    note(VERSION, "file", f"{server.plug_point}{event}", seen, **facts)
    assert seen.is_equal
    return seen


test_a_restart = restart.test_a_restarted_server_takes_the_tokens_from_the_store
test_logprobs = restart.test_logprobs_are_those_of_the_own_cache
test_wrong_bytes = restart.test_wrong_bytes_are_seen


def test_a_linker_and_hicache_share_pages(asked: Asked, tmp_path: Path) -> None:
    whole = asked.page_tokens(PAGE)
    with alone(), opened("file", tmp_path / "store") as store:
        with SGLangServer(tmp_path / "hicache", ours(store.backend, store.config)) as server:
            assert ask_cold(server, asked).is_equal
            server.settle()
        with linked(tmp_path / "linked", store) as server:
            assert seen_by(server, asked, "pages that HiCache stored").cached_tokens == whole


def test_two_ranks(asked: Asked, tmp_path: Path) -> None:
    """Each rank has its own heads. Without the pages of one of them, both compute."""
    whole = asked.page_tokens(PAGE)
    with (
        alone(),
        opened("file", tmp_path / "store") as store,
        linked(tmp_path / "server", store, "--tp-size", "2") as server,
    ):
        assert not seen_by(server, asked, "two ranks: computed").cached_tokens
        server.settle()
        server.end()
        server.start()
        assert seen_by(server, asked, "two ranks: restart", of=whole).cached_tokens == whole
        with store.open() as storage:
            heads = sorted(storage.spaces(), key=lambda space: str(space.shard))
            assert len(heads) == 2
            assert storage.remove_space(heads[1].id)
        seen = seen_by(server, asked, "two ranks: the pages of one are lost")
        assert not seen.cached_tokens


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
