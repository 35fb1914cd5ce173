"""Accesses of a trace: prefixes, the order of touches, samples."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_storage.planning.accesses import Accesses
from hicache_storage.replay.trace import BLOCK_TOKENS, Request, synthetic_trace


def _requests(*prompts: tuple[int, ...]) -> list[Request]:
    return [
        Request(float(number), len(blocks) * BLOCK_TOKENS, 1, blocks)
        for number, blocks in enumerate(prompts)
    ]


def test_equal_ids_behind_different_prefixes_are_different_blocks() -> None:
    accesses = Accesses.of(_requests((1, 9), (2, 9), (1, 9)))

    names = accesses.names.tolist()
    assert names[:2] == names[4:]
    assert 4 == len(set(names))


def test_a_found_prefix_is_touched_before_the_rest_and_each_from_its_tail() -> None:
    accesses = Accesses.of(_requests((1, 2), (1, 2, 3, 4)))

    assert [1, 0, 3, 2, 5, 4] == accesses.touches.tolist()
    assert [0, 0, 2, 2, 2, 2] == accesses.starts.tolist()


def test_requests_without_a_block_are_no_access() -> None:
    accesses = Accesses.of(_requests((), (1,), (), (1,)))

    assert [1, 3] == accesses.requests.tolist()


def test_neighbours_among_a_blocks_accesses_are_found() -> None:
    accesses = Accesses.of(_requests((1,), (2,), (1,), (1,)))
    marks = np.array([True, True, False, True])

    assert [-1, -1, 0, 0] == accesses.latest(marks).tolist()
    assert [3, -1, 3, -1] == accesses.following(marks).tolist()


@pytest.fixture(scope="module")
def accesses() -> Accesses:
    return Accesses.of(synthetic_trace(3, conversations=150))


class TestSamples:
    def test_a_sample_has_all_accesses_of_its_blocks(self, accesses: Accesses) -> None:
        sample = accesses.sampled(0.25)

        chosen = np.isin(accesses.names, sample.names)
        assert accesses.names[chosen].tolist() == sample.names.tolist()

    def test_a_sample_has_about_its_share_of_the_blocks(self, accesses: Accesses) -> None:
        share = len(set(accesses.sampled(0.25).names)) / len(set(accesses.names))

        assert 0.25 == pytest.approx(share, abs=0.05)

    def test_parts_are_the_whole(self, accesses: Accesses) -> None:
        sample = accesses.sampled(0.5)
        parts = sample.parts(4)

        assert len(sample) == sum(map(len, parts))
        assert [0.125] * 4 == [part.rate for part in parts]
        assert set(sample.names) == {name for part in parts for name in part.names}

    def test_a_sample_knows_how_many_accesses_were_expected(self, accesses: Accesses) -> None:
        assert len(accesses) / 4 == accesses.sampled(0.25).expected
