"""Ranks in real processes that agree, die, hang and close. A lost rank is noticed in bounded time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import rank_workers
from rank_workers import RankProcess, connect_all, rank_processes

from hicache_storage.controller import Channel, RanksLost, SingleRank

# A rank that notices a lost rank only by this timeout exceeds the test's own timeout.
_FOR_EVER_S = 600.0
_SOON_S = 1.0


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    """Yield three processes that no test ends."""
    with rank_processes(3) as ranks:
        yield ranks


@pytest.fixture
def ranks(processes: list[RankProcess], tmp_path: Path) -> list[RankProcess]:
    """Connect the processes and return them."""
    connect_all(processes, tmp_path, timeout_s=_FOR_EVER_S)
    return processes


def minima(ranks: list[RankProcess], channel: Channel, *values: list[int]) -> list[list[int]]:
    """Return the minimum on each rank of an all-reduce of `values`."""
    answers = [
        rank.submit(rank_workers.all_reduce_min, channel, own)
        for rank, own in zip(ranks, values, strict=True)
    ]
    return [answer.result() for answer in answers]


def loss(answer: Future[list[int]]) -> str:
    """Return the message of a rank's RanksLost."""
    with pytest.raises(RanksLost) as caught:
        answer.result()
    return str(caught.value)


class TestAgreement:
    def test_it_is_the_smallest_of_each_value(self, ranks: list[RankProcess]) -> None:
        answers = minima(ranks, Channel.MATCH, [5, 0, -7], [4, 1, 7], [6, 1, 0])

        assert [[4, 0, -7]] * 3 == answers

    @pytest.mark.parametrize("length", [0, 1, 509, 510, 511, 512, 3000])
    def test_of_any_number_of_values(self, ranks: list[RankProcess], length: int) -> None:
        values = [[(number * factor) % 1009 for number in range(length)] for factor in (3, 5, 7)]

        expected = [min(column) for column in zip(*values, strict=True)]
        assert [expected] * 3 == minima(ranks, Channel.RESULT, *values)

    def test_of_values_of_64_bits(self, ranks: list[RankProcess]) -> None:
        least, most = -(2**63), 2**63 - 1

        assert [[least, most]] * 3 == minima(
            ranks, Channel.MATCH, [least, most], [most, most], [0, most]
        )

    def test_channels_do_not_wait_for_each_other(self, ranks: list[RankProcess]) -> None:
        both = [
            rank.submit(rank_workers.both_channels, Channel.MATCH, Channel.RESULT)
            for rank in ranks[:2]
        ]
        in_turn = ranks[2].submit(rank_workers.in_turn, Channel.RESULT, Channel.MATCH)

        assert [[0], [1]] == in_turn.result()
        assert [[[1], [0]]] * 2 == [answers.result() for answers in both]

    def test_ranks_have_their_number_and_size(self, ranks: list[RankProcess]) -> None:
        assert [(0, 3), (1, 3), (2, 3)] == [
            rank.submit(rank_workers.rank_and_size).result() for rank in ranks
        ]

    @pytest.mark.parametrize("method", ["process group", "tcp"])
    def test_ranks_connect_by_a_process_group_or_at_an_address(
        self, processes: list[RankProcess], tmp_path: Path, method: str
    ) -> None:
        connect_all(processes, tmp_path, timeout_s=_FOR_EVER_S, method=method)

        assert [[1]] * 3 == minima(processes, Channel.MATCH, [3], [1], [2])
        assert [(0, 3), (1, 3), (2, 3)] == [
            rank.submit(rank_workers.rank_and_size).result() for rank in processes
        ]

    def test_a_single_rank_agrees_with_itself(self) -> None:
        assert [3, 1] == SingleRank().all_reduce_min(Channel.MATCH, (3, 1))


class TestLoss:
    @pytest.mark.parametrize("method", ["connect", "process group"])
    def test_a_rank_that_dies_is_noticed_at_once_by_waiting_ranks(
        self, tmp_path: Path, method: str
    ) -> None:
        with rank_processes(3) as ranks:
            connect_all(ranks, tmp_path, timeout_s=_FOR_EVER_S, method=method)
            waiting = [
                rank.submit(rank_workers.all_reduce_min, Channel.MATCH, [1]) for rank in ranks[:2]
            ]
            ranks[2].signal(signal.SIGKILL)

            for number, answer in enumerate(waiting):
                assert f"rank {number} lost the other 2 on channel match" in loss(answer)
            for rank in ranks[:2]:
                assert "restart the engine" in loss(
                    rank.submit(rank_workers.all_reduce_min, Channel.RESULT, [1])
                )
                rank.submit(rank_workers.close).result()

    @pytest.mark.parametrize("method", ["connect", "process group"])
    def test_a_rank_that_hangs_is_lost_after_the_timeout(self, tmp_path: Path, method: str) -> None:
        with rank_processes(2) as ranks:
            connect_all(ranks, tmp_path, timeout_s=_SOON_S, method=method)
            ranks[1].signal(signal.SIGSTOP)

            assert "on channel result" in loss(
                ranks[0].submit(rank_workers.all_reduce_min, Channel.RESULT, [1])
            )
            ranks[0].submit(rank_workers.close).result()

            ranks[1].signal(signal.SIGCONT)
            assert "on channel match" in loss(
                ranks[1].submit(rank_workers.all_reduce_min, Channel.MATCH, [1])
            )

    def test_a_rank_that_comes_late_finds_the_others_gone(
        self, processes: list[RankProcess], tmp_path: Path
    ) -> None:
        connect_all(processes, tmp_path, timeout_s=_SOON_S)
        early = [
            rank.submit(rank_workers.all_reduce_min, Channel.MATCH, [1]) for rank in processes[:2]
        ]
        for answer in early:
            assert "on channel match" in loss(answer)

        assert loss(processes[2].submit(rank_workers.all_reduce_min, Channel.MATCH, [1]))

    def test_a_rank_with_another_number_of_values_is_lost_on_all_and_ends_no_process(
        self, ranks: list[RankProcess]
    ) -> None:
        answers = [
            rank.submit(rank_workers.all_reduce_min, Channel.MATCH, [1] * length)
            for rank, length in zip(ranks, (300, 2, 300), strict=True)
        ]

        for answer in answers:
            assert "the ranks did not ask for the same agreement" in loss(answer)

    def test_a_rank_that_lost_the_others_keeps_no_connection_in_its_error(
        self, ranks: list[RankProcess]
    ) -> None:
        ranks[2].submit(rank_workers.close).result()

        answers = [rank.submit(rank_workers.connections_after_loss) for rank in ranks[:2]]
        assert [0, 0] == [answer.result() for answer in answers]

    def test_a_lost_rank_releases_waits_on_the_other_channel(
        self, ranks: list[RankProcess]
    ) -> None:
        waiting = [
            rank.submit(rank_workers.all_reduce_min, Channel.RESULT, [1]) for rank in ranks[:2]
        ]
        ranks[2].submit(rank_workers.close).result()

        for answer in waiting:
            assert "on channel result" in loss(answer)

    @pytest.mark.parametrize("method", ["connect", "process group"])
    def test_a_rank_with_another_request_causes_no_hang(
        self, processes: list[RankProcess], tmp_path: Path, method: str
    ) -> None:
        ranks = processes
        connect_all(ranks, tmp_path, timeout_s=_FOR_EVER_S, method=method)
        match, result = Channel.MATCH, Channel.RESULT
        both = [rank.submit(rank_workers.agreed_pages, "r", match, result) for rank in ranks[:2]]
        other = ranks[2].submit(rank_workers.agreed_pages, "another", match)

        assert other.result() == [0]
        assert [[0, 0]] * 2 == [pages.result() for pages in both]

    def test_after_close_nothing_is_agreed(self, ranks: list[RankProcess]) -> None:
        ranks[0].submit(rank_workers.close).result()

        assert "rank 0 has closed its connections" in loss(
            ranks[0].submit(rank_workers.all_reduce_min, Channel.MATCH, [1])
        )

    def test_a_rank_that_never_comes(self, processes: list[RankProcess], tmp_path: Path) -> None:
        answer = processes[0].submit(rank_workers.join, str(tmp_path / "alone"), 0, 2, _SOON_S)

        assert "rank 0 did not meet all 2 ranks within 1.0 s" in loss(answer)
