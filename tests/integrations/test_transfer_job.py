"""Loads and stores of an engine, and their pieces."""

from __future__ import annotations

import pytest
from job_runners import OTHER, SPACE, batch
from pages import hash_of, page

from hicache_storage.integrations._transfer_job import TransferJob
from hicache_storage.page_store.results import Transfer, Verdict

OK = Verdict.OK


def test_a_job_is_split_by_key_space_and_number() -> None:
    job = TransferJob(1, [batch(range(5)), batch(range(2), OTHER)], 10)
    pieces = job.split(lambda space: 2 if space == SPACE else 9)

    assert [(SPACE, 2), (SPACE, 2), (SPACE, 1), (OTHER, 2)] == [
        (piece.space, len(piece.pages.pages)) for piece in pieces
    ]
    assert [hash_of(2), hash_of(3)] == list(pieces[1].pages.hashes)


def test_the_last_piece_ends_the_job_in_any_order() -> None:
    job = TransferJob(1, [batch(range(3)), batch([0], OTHER)], 10)
    first, second, third = job.split(lambda _: 2)

    assert not job.record(third, [OK])
    assert not job.record(second, [Verdict.MISS])
    assert job.record(first, [OK, OK])
    result = job.result()
    assert ([[OK, OK, Verdict.MISS], [OK]], 2 * 4096 + 1000) == (result.verdicts, result.nbytes)


@pytest.mark.parametrize(
    ("verdict", "ends"),
    [(OK, False), (Verdict.MISS, False), (Verdict.REFUSED, False), (Verdict.CORRUPT, False)]
    + [(verdict, True) for verdict in (Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.BREAKER_OPEN)],
)
def test_a_page_without_an_answer_ends_the_job(verdict: Verdict, *, ends: bool) -> None:
    job = TransferJob(1, [batch(range(2))], 10)
    first, _ = job.split(lambda _: 1)
    job.record(first, [verdict])

    assert ends == (job.failure is not None)


@pytest.mark.parametrize(
    "wrong",
    [
        Transfer(SPACE, [hash_of(0)], []),
        Transfer(SPACE, [hash_of(0)], [page(), page()]),
        Transfer(SPACE, [hash_of(0)], [page(100)]),
    ],
    ids=["too few", "too many", "wrong size"],
)
def test_a_batch_has_one_page_of_the_right_size_for_each_hash(wrong: Transfer) -> None:
    with pytest.raises(ValueError, match="batch 1 needs 1 pages of 4096 bytes"):
        TransferJob(1, [batch([0]), wrong], 10).split(lambda _: 10)
