"""Whatever happens to a store under eight clients, each answer is right, and none waits for long."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack

import pytest
from serving.answers import Asked
from serving.faults import Fault, of, strike
from serving.stores import KEEPING, Store, opened, small_disk
from serving.vllm.conftest import SMALL, SMALL_NBYTES, many
from serving.vllm.server import VLLMServer, ours

_PROMPTS = 32
_DISK = "64m"
STALL_LIMIT_S = 4.0
"""A look-up may take 0.5 s, and the rows of a load that hangs are free within 3 s."""


@pytest.fixture(scope="module")
def asked(reference: VLLMServer) -> Asked:
    """Return more prompts than a server of `over` holds."""
    return many(reference, _PROMPTS)


@pytest.fixture(scope="module")
def over(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[VLLMServer, Store]]:
    """Yield a server with small pools over a store of this name, for all faults of the store."""
    directory = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        place = directory / "store"
        if request.param == "file":
            stack.enter_context(small_disk(place, _DISK))
        store = stack.enter_context(opened(request.param, place))
        kv = ours(store.backend, store.config, SMALL_NBYTES)
        server = VLLMServer(directory / "server", kv, *SMALL)
        yield stack.enter_context(server), store
        server.end()
        assert not server.left


@pytest.mark.long
@pytest.mark.parametrize(
    ("over", "fault"),
    [
        pytest.param(name, fault, id=f"{name}: {fault.name}")
        for name in KEEPING
        for fault in of(name)
    ],
    indirect=["over"],
)
def test_a_fault(over: tuple[VLLMServer, Store], fault: Fault, asked: Asked) -> None:
    server, store = over
    strike(fault, store, server, asked, stall_limit_s=STALL_LIMIT_S)
