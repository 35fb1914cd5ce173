"""Whatever happens to a store under eight clients, each answer is right, and none waits for long."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.answers import Asked
from serving.faults import Fault, of, strike
from serving.sglang.conftest import many
from serving.sglang.server import SGLangServer, ours
from serving.stores import KEEPING, Store, opened, small_disk

_PROMPTS = 32
_DISK = "64m"
STALL_LIMIT_S = 8.0
"""A look-up may take 2 s and a transfer 4 s; on a busy machine that takes a little longer."""


@pytest.fixture(scope="module")
def asked(small: SGLangServer) -> Asked:
    """Return more prompts than the pools hold."""
    return many(small, _PROMPTS)


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
    name: str, fault: Fault, small: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    small.detach()
    small.flush()
    with ExitStack() as stack:
        directory = tmp_path / "store"
        if fault.strike is Store.fill and name == "file":
            directory = stack.enter_context(small_disk(directory, _DISK)).parent
        store = stack.enter_context(opened(name, directory))
        small.attach(ours(store.backend, store.config))
        strike(fault, store, small, asked, stall_limit_s=STALL_LIMIT_S)
        small.settle()
        small.detach()
