"""Forked processes are killed at a chosen point, and are dead when the check ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.subject import Subject
from hicache_conformance.scenarios.fork_server import (
    HELD,
    ForkServer,
    write_half,
    write_until_the_limit,
)
from hicache_conformance.scenarios.remote_storage import kill_after_next_call, open_remote, serve
from hicache_conformance.selftest.references.subjects import ShelfSubject
from hicache_conformance.tools.processes.child import Link
from processes import is_alive


@pytest.fixture
def case() -> Generator[Case, None, None]:
    with Case(ShelfSubject()) as made:
        yield made


def test_a_process_is_killed_by_the_kernel_at_a_byte_of_a_file(case: Case) -> None:
    store, space = case.open(), case.space(1000)
    store.open_space(space)
    fork_server = ForkServer(case)
    page = case.contents(space, case.hashes(1))

    messages = [
        fork_server.spawn(write_until_the_limit, space, page, limit).remaining_messages()
        for limit in (999, 1000)
    ]

    assert [[], [[True]]] == messages


def test_a_process_reports_when_it_is_half_way_through_a_page(case: Case) -> None:
    store, space = case.open(), case.space(1000)
    store.open_space(space)
    writer = ForkServer(case).spawn(write_half, space, {}, case.contents(space, case.hashes(1)), 4)

    assert [[], HELD] == [writer.receive(), writer.receive()]

    assert [] == writer.kill()


def test_a_process_that_was_not_killed_is_killed_when_the_next_one_starts(case: Case) -> None:
    space = case.space(1000)
    fork_server = ForkServer(case)
    page = case.contents(space, case.hashes(1))
    first = fork_server.spawn(write_half, space, {}, page, 4)

    fork_server.spawn(write_half, space, {}, page, 4)

    with pytest.raises(EOFError):
        first.receive()


def test_a_process_that_is_left_is_dead_when_its_store_is_removed() -> None:
    with Case(ShelfSubject()) as case:
        space = case.space(1000)
        page = case.contents(space, case.hashes(1))
        left = ForkServer(case).spawn(write_half, space, {}, page, 4)
        # A stopped process can't end by itself.
        os.kill(left._pid, signal.SIGSTOP)

    try:
        assert not is_alive(left._pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left._pid, signal.SIGKILL)


def test_the_class_is_loaded_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of_module(tmp_path, monkeypatch, "LOADED_IN = os.getpid()")

    with Case(subject) as case:
        fork_server = ForkServer(case)
        loaded_in = [fork_server.spawn(send_module, "LOADED_IN").receive() for _ in range(2)]

    assert loaded_in[0] == loaded_in[1] != os.getpid()


def test_a_class_whose_module_starts_threads_is_loaded_in_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    LOADED_IN = os.getpid()
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    """
    subject = subject_of_module(tmp_path, monkeypatch, code)

    with Case(subject) as case:
        process = ForkServer(case).spawn(send_module, "LOADED_IN")
        loaded_in = process.receive()

    assert process._pid == loaded_in


def send_module(link: Link, name: str) -> None:
    """Send a variable of the module of the storage class (the actor of a process)."""
    assert link.reference is not None
    link.reference.load()
    link.send(getattr(importlib.import_module(link.reference.module), name))


def subject_of_module(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Subject:
    """Return the subject of a store in a module of its own that runs `code`."""
    name = f"loaded_{directory.name}"
    (directory / f"{name}.py").write_text(
        "import os, threading\n"
        "from hicache_conformance.selftest.references.file_a_page import Shelf\n"
        f"{textwrap.dedent(code)}\n"
        "class Loaded(Shelf): pass\n"
    )
    monkeypatch.setattr(sys, "path", [str(directory), *sys.path])
    storage_class: Any = importlib.import_module(name).Loaded
    subject: Subject = type("LoadedSubject", (ShelfSubject,), {"storage_class": storage_class})()
    return subject


def test_a_remote_storage_dies_right_after_the_call_that_is_its_last(case: Case) -> None:
    space = case.space(64)
    process = ForkServer(case).spawn(serve)
    store = open_remote(case, "there", process)
    store.open_space(space)
    kill_after_next_call(store)

    pages = case.stored(store, space, 1)

    assert [] == process.remaining_messages()
    with pytest.raises(EOFError):
        process.receive()
    case.must_hold(case.open(), space, pages)
