"""Moves of pieces: the memory of a call whose end is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.memory import MemoryStorage
from job_runners import SPACE, batch

from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.integrations._job_results import JobKind
from hicache_storage.integrations._piece_mover import PieceMover
from hicache_storage.integrations._private_memory import PrivateMemory
from hicache_storage.integrations._transfer_job import TransferJob
from hicache_storage.page_store import PageStore, frame
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.integrations._transfer_job import Piece


class _Failing(PageStore):
    """A page store that fails after its calls may have begun."""

    def save(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("in the middle of a call")


class _Setup:
    """A mover of stores, with its memory."""

    def __init__(self, store: PageStore, *, lends_memory: bool) -> None:
        self.store = store
        store.open_space(SPACE)
        self.engine = CallGate()
        self.memory = PrivateMemory(store, 1 << 20)
        self.mover = PieceMover(
            JobKind.STORE,
            store,
            self.engine,
            self.memory,
            lends_memory=lends_memory,
            settle_s=0.1,
        )

    def piece(self, pages: int = 1) -> Piece:
        (piece,) = TransferJob(1, [batch(range(pages))], 10).split(self.mover.max_pages)
        return piece

    def move(self, piece: Piece) -> list[Verdict]:
        verdicts: list[Verdict] = []
        self.mover.move(piece, verdicts.extend)
        return verdicts


@pytest.fixture(params=[False, True], ids=["private", "lent"])
def lends_memory(request: pytest.FixtureRequest) -> bool:
    lends: bool = request.param
    return lends


@pytest.fixture
def setup(lends_memory: bool) -> Generator[_Setup]:  # noqa: FBT001 - a fixture
    with PageStore(MemoryStorage.from_config({})) as store:
        yield _Setup(store, lends_memory=lends_memory)


def test_memory_is_free_again_after_a_move(setup: _Setup) -> None:
    assert [Verdict.OK] * 3 == setup.move(setup.piece(3))
    assert 0 == setup.memory.used_nbytes < setup.memory.nbytes
    assert not setup.engine.calls


def test_a_move_after_the_memory_was_taken_back_is_not_tried(setup: _Setup) -> None:
    setup.engine.close()

    assert [Verdict.UNAVAILABLE] == setup.move(setup.piece())
    assert 0 == setup.memory.used_nbytes


def test_a_copied_page_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "payload_checksums", None)  # a second hash would fail
    with PageStore(MemoryStorage.from_config({})) as store:
        setup = _Setup(store, lends_memory=False)
        assert [Verdict.OK] * 3 == setup.move(setup.piece(3))


def test_the_buffers_of_a_key_space_have_one_size(setup: _Setup) -> None:
    setup.move(setup.piece(1))
    nbytes = setup.memory.nbytes
    setup.move(setup.piece(7))

    assert nbytes == setup.memory.nbytes


def test_a_call_whose_end_is_unknown_keeps_its_private_memory(lends_memory: bool) -> None:  # noqa: FBT001 - a fixture
    with _Failing(MemoryStorage.from_config({})) as store:
        setup = _Setup(store, lends_memory=lends_memory)
        with pytest.raises(RuntimeError):
            setup.move(setup.piece())

        assert setup.memory.used_nbytes > 0
        assert not setup.engine.calls  # a bounded store has ended its calls by now


def _pages(pieces: Sequence[Piece]) -> list[int]:
    return [len(piece.pages) for piece in pieces]


def test_an_eighth_of_the_memory_is_enough_for_a_piece(setup: _Setup) -> None:
    pieces = TransferJob(1, [batch(range(40))], 10).split(setup.mover.max_pages)

    assert 40 == sum(_pages(pieces))
    assert {16} == set(_pages(pieces)[:-1])
