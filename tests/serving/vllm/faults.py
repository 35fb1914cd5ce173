"""Whatever happens to a store under eight clients, each answer is right, and none waits for long."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from servers import RedisServer
from serving.answers import Asked
from serving.faults import FOREIGN_LIMIT_S, FULL, KILLED, STOPPED, Fault, of, strike, watch
from serving.stores import KEEPING, EngineStore, Store, opened, small_disk
from serving.vllm.conftest import SMALL, SMALL_NBYTES, many
from serving.vllm.lmcache import LMCacheServer, LMCacheVLLM
from serving.vllm.server import VLLMServer, fs, ours

_PROMPTS = 32
_DISK = "64m"
STALL_LIMIT_S = 4.0
"""A look-up may take 0.5 s, and the rows of a load that hangs are free within 3 s."""


@pytest.fixture(scope="module")
def asked(reference: VLLMServer) -> Asked:
    """Return more prompts than these servers hold."""
    return many(reference, _PROMPTS)


@contextmanager
def serving(name: str, directory: Path) -> Generator[tuple[VLLMServer, Store]]:
    """Yield a server with small pools over a store of this name."""
    with ExitStack() as stack:
        place = directory / "store"
        if name == "file":
            stack.enter_context(small_disk(place, _DISK))
        store = stack.enter_context(opened(name, place))
        kv = ours(store.backend, store.config, SMALL_NBYTES)
        server = stack.enter_context(VLLMServer(directory / "server", kv, *SMALL))
        yield server, store
        server.end()
        assert not server.left


@pytest.fixture(scope="module")
def over(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[Callable[[str], tuple[VLLMServer, Store]]]:
    """Yield a function that returns a server and its store, the same for all faults of a store."""
    running: dict[str, tuple[VLLMServer, Store]] = {}
    with ExitStack() as stack:

        def get(name: str) -> tuple[VLLMServer, Store]:
            if name not in running:
                stack.close()
                running.clear()
                running[name] = stack.enter_context(serving(name, tmp_path_factory.mktemp(name)))
            return running[name]

        yield get


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, id=f"{name}: {fault.name}")
        for name in KEEPING
        for fault in of(name)
    ],
)
def test_a_fault(
    name: str, fault: Fault, over: Callable[[str], tuple[VLLMServer, Store]], asked: Asked
) -> None:
    server, store = over(name)
    strike(fault, store, server, asked, stall_limit_s=STALL_LIMIT_S)


@pytest.mark.long
def test_the_fs_tier_of_vllm_is_full(asked: Asked, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", _DISK) as pages:
        store = EngineStore("vLLM's fs", {}, directory=pages)
        with VLLMServer(tmp_path / "server", fs(pages, SMALL_NBYTES), *SMALL) as server:
            course = watch(FULL, store, server, asked)
    assert course.loaded_in_calm, course


@pytest.mark.long
@pytest.mark.parametrize("fault", [STOPPED, KILLED, FULL], ids=lambda fault: fault.name)
def test_the_resp_adapter_of_lmcache(fault: Fault, asked: Asked, tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis") as redis,
        LMCacheServer(tmp_path / "lmcache", redis) as lmcache,
        LMCacheVLLM(tmp_path / "server", lmcache, *SMALL) as server,
    ):
        store = EngineStore("LMCache's resp", {}, redis)
        course = watch(fault, store, server, asked, stage_limit_s=FOREIGN_LIMIT_S)
    assert course.loaded_in_calm, course
