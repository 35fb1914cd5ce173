"""Hand-offs between real processes: prefill ranks that end well, and ranks that are killed."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from handoff_sides import (
    HALF,
    HASTY,
    KINDS,
    PATIENT,
    PROMPT,
    is_right,
    left_behind,
    receiving,
    start_prefill,
)
from servers import RedisServer, wait_until

from hicache_storage.registry import open_storage

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage.controller.handoff import Incoming

DEATHS = {
    "before its writes": 0,
    "within its writes": HALF,
    "after its writes": len(PROMPT),
    "after its completion": len(PROMPT),
}
"""When a prefill rank is killed, and how many pages it leaves then."""


def taken(incoming: Incoming) -> int:
    """The length of the prefix that came, every byte of it right."""
    with incoming.result() as lease:
        assert is_right(lease)
        return lease.pages


def handed_over(backend: str, config: dict[str, Any], kind: str) -> None:
    """One process computes what another waits for, and nothing is left."""
    clean = replace(PATIENT, delete_pages=True)
    with open_storage(backend, config) as storage:
        with (
            receiving(storage, kind=kind, handoff=clean) as receiver,
            start_prefill(backend, config, kind=kind) as prefill,
        ):
            incoming = receiver.expect("request-1", PROMPT)
            assert taken(incoming) == len(PROMPT)
            assert incoming.missing == []
        assert prefill.returncode == 0
        assert left_behind(storage) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_pages_change_hands_over_a_directory(tmp_path: Path, kind: str) -> None:
    handed_over("file", {"path": str(tmp_path)}, kind)


def test_pages_change_hands_over_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        handed_over("redis", {"url": server.url}, "mla-mha")


@pytest.mark.parametrize("kind", ["mla-mha", "mha-mla"])
def test_two_ranks_hand_over_to_two(tmp_path: Path, kind: str) -> None:
    """A replicated pool has one completion, which both ranks wait for; a sharded pool has one a rank."""
    config = {"path": str(tmp_path)}
    with ExitStack() as stack:
        storage = stack.enter_context(open_storage("file", config))
        incoming = [
            stack.enter_context(receiving(storage, kind=kind, rank=rank, size=2)).expect(
                "request-1", PROMPT
            )
            for rank in range(2)
        ]
        for rank in range(2):
            stack.enter_context(start_prefill("file", config, kind=kind, rank=rank, size=2))

        wait_until(lambda: not any(each.missing for each in incoming))
        assert left_behind(storage)["handoff"] == 3
        assert [len(PROMPT)] * 2 == [taken(each) for each in incoming]


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_prefill_leaves_a_right_prefix_and_nothing_after_it(
    tmp_path: Path, death: str
) -> None:
    config = {"path": str(tmp_path)}
    clean = replace(HASTY, delete_pages=True)
    with start_prefill("file", config, dies=death) as prefill:
        assert prefill.wait(60) == -signal.SIGKILL

    with open_storage("file", config) as storage:
        with receiving(storage, handoff=clean) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == DEATHS[death]
        assert left_behind(storage) == {}


def test_a_killed_rank_shortens_the_prefix_of_those_who_read_its_shard(tmp_path: Path) -> None:
    """Of two prefill ranks the second dies half-way: its heads of the draft are missing."""
    config = {"path": str(tmp_path)}
    with (
        start_prefill("file", config, rank=0, size=2) as whole,
        start_prefill("file", config, rank=1, size=2, dies="within its writes") as killed,
    ):
        assert (whole.wait(60), killed.wait(60)) == (0, -signal.SIGKILL)

    with open_storage("file", config) as storage:
        pages: list[int] = []
        for rank in (1, 0):
            with receiving(storage, rank=rank, size=2, handoff=HASTY) as receiver:
                pages.append(taken(receiver.expect("request-1", PROMPT)))
        assert [HALF, len(PROMPT)] == pages
        assert "handoff" not in left_behind(storage)
