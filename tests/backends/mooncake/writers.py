"""`mooncake`: a writer that is killed in any phase of a set leaves its page absent or whole."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hicache_conformance import FaultProxy
from pages import blank, hash_of, page, space
from servers import MooncakeMaster, MooncakeNode, load_mooncake, wait_until

from hicache_storage import open_storage
from hicache_storage.storage import HiCacheStorage

load_mooncake()
importlib.import_module("mooncake.store")

SPACE = space()
TRIES = 3
"""How many writers to kill in each phase, because a heartbeat may be counted as a request."""
DELAY_S = 0.2
UNFINISHED = -703


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    timeouts = ("--put_start_discard_timeout_sec=2", "--put_start_release_timeout_sec=3")
    with (
        MooncakeMaster(tmp_path_factory.mktemp("master"), *timeouts) as started,
        MooncakeNode(started, "64mb"),
        open_storage("mooncake", config_of(started)),  # all tests share this client
    ):
        yield started


def write(config: dict[str, Any], number: int, pipe: Connection) -> None:
    """Set one page in another process when the parent asks for it."""
    load_mooncake()
    with open_storage("mooncake", config) as storage:
        storage.open_space(SPACE)
        pipe.send("ready")
        pipe.recv()
        pipe.send(storage.batch_set(SPACE, [hash_of(number)], [page(seed=number)]))
        pipe.recv()


def kill_in_phase(master: MooncakeMaster, phase: int, number: int) -> None:
    """Kill a writer of page `number` in this phase. The proxy holds the request, then drops it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with here, there, FaultProxy(("127.0.0.1", master.port)) as proxy:
        config = config_of(master)
        config["master_server_address"] = "{}:{}".format(*proxy.address)
        writer = context.Process(target=write, args=(config, number, there))
        writer.start()
        assert here.poll(30)
        assert here.recv() == "ready"
        proxy.delay(DELAY_S)  # every request waits in the proxy, where it can be counted
        before = proxy.turns
        here.send("go")
        wait_until(lambda: here.poll() or proxy.turns >= before + phase)
        proxy.refuse()
        writer.kill()
        writer.join()


def config_of(master: MooncakeMaster) -> dict[str, Any]:
    return master.config(global_segment_size=0, extra_backend_tag="shared")


@pytest.mark.parametrize(
    ("phase", "expected"),
    [(1, "absent"), (2, "absent"), (3, "absent"), (4, "unfinished"), (5, "whole")],
)
def test_a_writer_killed_in_any_phase_leaves_its_page_absent_or_whole(
    master: MooncakeMaster, phase: int, expected: str
) -> None:
    """A set has five requests: presence, unfinished keys, allocation, data, and the end of the put."""
    with open_storage("mooncake", config_of(master)) as storage:
        storage.open_space(SPACE)
        states: list[str] = []
        for number in range(10 * phase, 10 * phase + TRIES):
            kill_in_phase(master, phase, number)
            states.append(left_by(storage, number))
            wait_until(partial(is_healed, storage, number))
            if states[-1] == expected:
                return
    pytest.fail(f"none of {TRIES} writers was killed in phase {phase}: {states}")


def left_by(storage: HiCacheStorage, number: int) -> str:
    """Return the state of the page of a killed writer."""
    native: Any = vars(storage)["_client"]._native
    found = blank()
    if storage.batch_get(SPACE, [hash_of(number)], [found]) == [True]:
        assert found.tobytes() == page(seed=number).tobytes()
        return "whole"
    assert storage.batch_exists(SPACE, [hash_of(number)]) == [False]
    key = f"shared/{SPACE.id}/{hash_of(number)}"
    return "unfinished" if native.get_size(key) == UNFINISHED else "absent"


def is_healed(storage: HiCacheStorage, number: int) -> bool:
    """Return True once a set has stored the page.

    The master discards an unfinished page after a while.
    """
    stored = storage.batch_set(SPACE, [hash_of(number)], [page(seed=number)])
    found = blank()
    assert stored == storage.batch_get(SPACE, [hash_of(number)], [found])
    assert stored == [False] or found.tobytes() == page(seed=number).tobytes()
    return stored == [True]
