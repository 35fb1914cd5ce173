"""Hand-offs between real processes: prefill ranks that end by themselves, or are killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from handoff_sides import (
    HALF,
    HASTY,
    KINDS,
    PATIENT,
    PROMPT,
    decode,
    is_right,
    receiving,
    start_prefill,
    stored_pages,
)
from rank_workers import RankProcess, rank_processes
from servers import RedisServer, wait_until

from hicache_storage.handoff import HandoffRequest, HandoffSettings
from hicache_storage.registry import open_storage

CLEAN = replace(PATIENT, delete_pages=True)
CLEAN_AND_HASTY = replace(HASTY, delete_pages=True)
DEATHS = {
    "before its writes": 0,
    "within its writes": HALF,
    "after its writes": len(PROMPT),
    "after its completion": len(PROMPT),
}
"""The times at which a prefill rank is killed, and the pages that it has stored by then."""


def taken(request: HandoffRequest) -> int:
    """Take the result of a request. Return its number of pages, after checking their content."""
    with request.result() as lease:
        assert is_right(lease)
        return lease.pages


def handed_over(backend: str, config: dict[str, Any], kind: str) -> None:
    """Hand a request over from another process, and check that no page is left."""
    with open_storage(backend, config) as storage:
        with (
            receiving(storage, kind=kind, handoff=CLEAN) as receiver,
            start_prefill(backend, config, kind=kind) as prefill,
        ):
            request = receiver.expect("request-1", PROMPT)
            assert taken(request) == len(PROMPT)
            assert request.missing == []
        assert prefill.returncode == 0
        assert stored_pages(storage) == {}


def test_pages_are_handed_over_by_a_directory(tmp_path: Path) -> None:
    handed_over("file", {"path": str(tmp_path)}, "mha-mla")


def test_pages_are_handed_over_by_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        handed_over("redis", {"url": server.url}, "mla-mha")


def test_two_ranks_hand_over_to_two(tmp_path: Path) -> None:
    """Both ranks wait for a replicated pool's completion, and each for its own in a sharded pool."""
    config = {"path": str(tmp_path)}
    with ExitStack() as stack:
        storage = stack.enter_context(open_storage("file", config))
        request = [
            stack.enter_context(receiving(storage, rank=rank, size=2)).expect("request-1", PROMPT)
            for rank in range(2)
        ]
        for rank in range(2):
            stack.enter_context(start_prefill("file", config, rank=rank, size=2))

        wait_until(lambda: not any(each.missing for each in request))
        assert stored_pages(storage)["handoff"] == 3
        assert [len(PROMPT)] * 2 == [taken(each) for each in request]


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_prefill_leaves_a_right_prefix_and_nothing_after_it(
    tmp_path: Path, death: str
) -> None:
    config = {"path": str(tmp_path)}
    with start_prefill("file", config, dies=death) as prefill:
        assert prefill.wait(60) == -signal.SIGKILL

    with open_storage("file", config) as storage:
        with receiving(storage, handoff=CLEAN_AND_HASTY) as receiver:
            assert taken(receiver.expect("request-1", PROMPT)) == DEATHS[death]
        assert stored_pages(storage) == {}


def test_a_killed_rank_shortens_the_prefix_of_ranks_that_read_its_shard(tmp_path: Path) -> None:
    """The second of two prefill ranks dies half way, so its heads of the draft are missing."""
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
        assert "handoff" not in stored_pages(storage)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hand_over_to_one(tmp_path: Path, kind: str) -> None:
    """The decode rank waits for each shard that it reads, whichever rank writes it."""
    config = {"path": str(tmp_path)}
    sharded = kind.split("-").count("mha")
    with ExitStack() as stack:
        storage = stack.enter_context(open_storage("file", config))
        receiver = stack.enter_context(receiving(storage, kind=kind, other_size=2, handoff=CLEAN))
        request = receiver.expect("request-1", PROMPT)
        assert len(request.awaited) == 2 + sharded
        for rank in range(2):
            which: dict[str, Any] = {"kind": kind, "rank": rank, "size": 2, "other_size": 1}
            stack.enter_context(start_prefill("file", config, **which))
        assert taken(request) == len(PROMPT)
        assert request.missing == []
        assert receiver.close()
        assert stored_pages(storage) == {}


@pytest.fixture(scope="module")
def decode_processes() -> Iterator[list[RankProcess]]:
    """Yield two processes for the ranks of decode engines."""
    with rank_processes(2) as processes:
        yield processes


def decoded_by_two(
    processes: list[RankProcess], root: Path, settings: HandoffSettings, **which: Any
) -> list[tuple[int, int, bool]]:
    """Decode on two ranks. Return the result of `decode` on each rank."""
    config, place = {"path": str(root / "store")}, str(root / "ranks")
    answers = [
        process.submit(decode, "file", config, place, settings, {**which, "rank": rank})
        for rank, process in enumerate(processes)
    ]
    return [answer.result(100) for answer in answers]


@pytest.mark.parametrize(("kind", "size"), [("mla-mha", 1), ("mha-mla", 4)])
def test_ranks_that_agree_take_over_from_fewer_or_more(
    tmp_path: Path, decode_processes: list[RankProcess], kind: str, size: int
) -> None:
    config = {"path": str(tmp_path / "store")}
    with ExitStack() as stack:
        for rank in range(size):
            which: dict[str, Any] = {"kind": kind, "rank": rank, "size": size, "other_size": 2}
            stack.enter_context(start_prefill("file", config, **which))
        both = decoded_by_two(decode_processes, tmp_path, CLEAN, kind=kind, size=2, other_size=size)

    assert [(len(PROMPT), 0, True)] * 2 == both
    with open_storage("file", config) as storage:
        assert stored_pages(storage) == {}


def test_ranks_that_agree_shorten_their_prefix_together(
    tmp_path: Path, decode_processes: list[RankProcess]
) -> None:
    """One of the decode ranks reads shards that the killed prefill rank did not write."""
    config = {"path": str(tmp_path / "store")}
    with (
        start_prefill("file", config, rank=0, size=2) as whole,
        start_prefill("file", config, rank=1, size=2, dies="within its writes") as killed,
    ):
        assert (whole.wait(60), killed.wait(60)) == (0, -signal.SIGKILL)

    both = decoded_by_two(decode_processes, tmp_path, CLEAN_AND_HASTY, size=2)

    assert [(HALF, True)] * 2 == [(pages, right) for pages, _, right in both]
    with open_storage("file", config) as storage:
        assert stored_pages(storage) == {}
