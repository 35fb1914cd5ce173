"""Whatever happens to a store under eight clients, each answer is right, and none waits for long."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from serving.answers import Asked
from serving.faults import FOREIGN_LIMIT_S, FULL, KILLED, STOPPED, Fault, of, strike, watch
from serving.sglang.conftest import many
from serving.sglang.server import SGLangServer, ours, own_file
from serving.stores import KEEPING, EngineStore, Store, opened, small_disk

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


@pytest.mark.long
def test_the_file_backend_of_sglang_is_full(
    small: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    small.detach()
    small.flush()
    with small_disk(tmp_path / "disk", _DISK) as pages:
        pages.mkdir()
        small.own_directory.symlink_to(pages)
        small.attach(own_file())
        store = EngineStore("SGLang's file", {}, directory=pages)
        course = watch(FULL, store, small, asked)
        small.settle()
        small.detach()
    assert course.loaded_in_calm, course


@pytest.mark.long
@pytest.mark.parametrize("fault", [STOPPED, KILLED], ids=lambda fault: fault.name)
def test_the_mooncake_backend_of_sglang(
    fault: Fault, small: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    """It gets a server of its own, because it may not be idle again after a fault."""
    small.pause()  # its scheduler spins if it is idle
    try:
        with (
            opened("mooncake", tmp_path / "store") as store,
            SGLangServer(
                tmp_path / "server", ("mooncake", store.config), tokens=small.tokens
            ) as server,
        ):
            own = replace(store, backend="SGLang's mooncake")
            course = watch(fault, own, server, asked, stage_limit_s=FOREIGN_LIMIT_S)
    finally:
        small.resume()
    assert course.loaded_in_calm, course
