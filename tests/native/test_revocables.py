"""Revocable memory: the data plane touches no byte of it once `revoke_access` has returned."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from data_planes import BOTH
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, LATE, MISS, REVOKED
from hicache_storage.native.reference import revocables
from hicache_storage.native.reference.revocables import CHUNK_NBYTES

if TYPE_CHECKING:
    from pathlib import Path

SOON_S = 3600.0
RUN = bytearray(1)
NAME = b"HiPg" + bytes([1, 0, 0, 0]) + bytes(32)
NBYTES = 3 * CHUNK_NBYTES + 5


def content(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def trailer() -> bytes:
    body = NAME + bytes(16)
    return body + xxhash.xxh3_64_digest(body)


def by_s() -> float:
    return time.monotonic() + SOON_S


def read(
    module: Any, path: Path, pieces: list[bytearray], state: bytearray, *, skip: int = -1
) -> tuple[int, int]:
    nbytes = sum(map(len, pieces))
    verdicts, digests = module.read_files(
        [os.fsencode(path)], [NAME], [pieces], nbytes, -1, 0, skip, by_s(), [state]
    )
    return verdicts[0], digests[0]


def write(module: Any, path: Path, page: bytes, state: bytearray, *, recycled: int = 0) -> int:
    source = path.with_suffix(".old" if recycled else ".new")
    (verdict,) = module.write_files(
        [os.fsencode(source)],
        [os.fsencode(path)],
        [trailer()],
        [[page[:7], page[7:]]],
        len(page),
        1,
        recycled,
        by_s(),
        RUN,
        [state],
    )
    return int(verdict)


def revoked(module: Any) -> bytearray:
    state = bytearray(8)
    module.revoke_access(state)
    return state


@pytest.fixture(params=BOTH)
def module(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_an_access_is_refused_after_the_revoke(module: Any) -> None:
    state = bytearray(8)
    assert module.begin_access(state)
    module.end_access(state)
    module.revoke_access(state)

    assert not module.begin_access(state)


def test_a_second_revoke_returns(module: Any) -> None:
    module.revoke_access(revoked(module))


def test_revoke_returns_at_the_end_of_the_access_under_way(module: Any) -> None:
    state = bytearray(8)
    assert module.begin_access(state)
    revoking = threading.Thread(target=module.revoke_access, args=(state,))
    revoking.start()
    while not state[7]:
        time.sleep(0.001)
    assert revoking.is_alive()

    module.end_access(state)
    revoking.join()


def test_the_states_of_both_are_equal() -> None:
    assert 1 == len({bytes(revoked(each.values[0])) for each in BOTH})


@pytest.mark.parametrize("state", [bytearray(7), bytearray(9)])
def test_a_state_has_8_bytes(module: Any, state: bytearray) -> None:
    for function in (module.begin_access, module.end_access, module.revoke_access):
        with pytest.raises(ValueError, match=r".+"):
            function(state)
    with pytest.raises(ValueError, match=r".+"):
        module.digests([[b"page"]], [state])
    with pytest.raises(ValueError, match=r".+"):
        module.digests([[b"page"]], [bytearray(8)] * 2)


@pytest.mark.parametrize("nbytes", [1, CHUNK_NBYTES, CHUNK_NBYTES + 1, NBYTES])
@pytest.mark.parametrize("skip", [-1, 0, 100, CHUNK_NBYTES + 3])
def test_a_page_is_written_and_read(module: Any, tmp_path: Path, nbytes: int, skip: int) -> None:
    page, path = content(nbytes), tmp_path / "page"
    assert HIT == write(module, path, page, bytearray(8))
    pieces = [bytearray(nbytes // 3), bytearray(0), bytearray(nbytes - nbytes // 3)]

    verdict, digest = read(module, path, pieces, bytearray(8), skip=skip)

    assert page + trailer() == path.read_bytes()
    assert (HIT, page) == (verdict, b"".join(pieces))
    assert digest == (xxhash.xxh3_64_intdigest(page[skip:]) if skip >= 0 else 0)


def test_a_page_of_many_pieces_is_read(module: Any, tmp_path: Path) -> None:
    page, path = content(3000), tmp_path / "page"
    path.write_bytes(page + trailer())
    pieces = [bytearray(3) for _ in range(1000)]

    verdict, digest = read(module, path, pieces, bytearray(8), skip=1)

    assert (HIT, page) == (verdict, b"".join(pieces))
    assert xxhash.xxh3_64_intdigest(page[1:]) == digest


def test_a_page_that_was_revoked_before_is_not_read(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(content(NBYTES) + trailer())
    page = bytearray(NBYTES)

    assert (REVOKED, 0) == read(module, path, [page], revoked(module), skip=0)
    assert not any(page)


def test_a_file_that_ends_early_is_a_miss(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(trailer())

    assert MISS == read(module, path.with_name("none"), [bytearray(9)], bytearray(8))[0]


@pytest.mark.parametrize("recycled", [0, 1])
def test_a_page_that_was_revoked_before_leaves_no_file(
    module: Any, tmp_path: Path, recycled: int
) -> None:
    (tmp_path / "page.old").write_bytes(content(NBYTES) + trailer())
    verdict = write(module, tmp_path / "page", content(NBYTES), revoked(module), recycled=recycled)

    assert REVOKED == verdict
    assert [] == list(tmp_path.glob("page")) == list(tmp_path.glob("page.new"))
    assert recycled == (not (tmp_path / "page.old").exists())


def test_other_pages_of_the_batch_are_moved(module: Any, tmp_path: Path) -> None:
    paths = [os.fsencode(tmp_path / name) for name in "abc"]
    states = [bytearray(), revoked(module), bytearray(8)]
    arguments = [[b"a"], [b"b"], [b"c"]], 1, 10, 0, by_s(), RUN, states
    written = module.write_files(
        [path + b".new" for path in paths], paths, [trailer()] * 3, *arguments
    )
    memory = [[bytearray(1)] for _ in paths]

    found, _ = module.read_files(paths, [NAME] * 3, memory, 1, -1, 0, -1, by_s(), states)

    assert [HIT, REVOKED, HIT] == written
    assert [HIT, MISS, HIT] == found
    assert [b"a", b"\0", b"c"] == [bytes(page) for (page,) in memory]


def test_a_page_after_the_deadline_is_late(module: Any, tmp_path: Path) -> None:
    late, _ = module.read_files(
        [os.fsencode(tmp_path)], [NAME], [[bytearray(1)]], 1, -1, 0, -1, 0.0, [bytearray(8)]
    )

    assert [LATE] == late


@settings(deadline=None)
@given(
    pages=st.lists(
        st.tuples(st.lists(st.binary(min_size=1, max_size=99), max_size=4), st.integers(0, 2))
    )
)
@pytest.mark.parametrize("module", BOTH)
def test_digests_of_revoked_pages_are_none(
    module: Any, pages: list[tuple[list[bytes], int]]
) -> None:
    states = [(bytearray(), bytearray(8), revoked(module))[kind] for _, kind in pages]
    expected = [
        None if kind == 2 and page else xxhash.xxh3_64_intdigest(b"".join(page))
        for page, kind in pages
    ]

    assert expected == module.digests([page for page, _ in pages], states)


def test_nothing_is_read_into_revoked_memory_under_load(module: Any, tmp_path: Path) -> None:
    """Reads run in a thread while this thread revokes, and then watches the memory."""
    path = tmp_path / "page"
    path.write_bytes(content(NBYTES) + trailer())
    for attempt in range(20):
        page, state = bytearray(NBYTES), bytearray(8)
        verdicts: list[int] = []

        def read_until_revoked(page: bytearray = page, state: bytearray = state) -> None:
            verdict = HIT
            while verdict == HIT:
                verdict, _ = read(module, path, [page], state)
            verdicts.append(verdict)  # noqa: B023 - the thread ends in this round

        reading = threading.Thread(target=read_until_revoked)
        reading.start()
        time.sleep(attempt / 10_000)
        module.revoke_access(state)
        page[:] = b"\xff" * NBYTES
        reading.join()

        assert [REVOKED] == verdicts
        assert NBYTES == page.count(0xFF)


def test_a_forked_child_has_a_lock_of_its_own() -> None:
    state = bytearray(8)
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with revocables._ACCESSES.changed:
            is_held.set()
            is_over.wait()

    holder = threading.Thread(target=hold)  # a thread that the child has not
    holder.start()
    is_held.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)
        revocables.revoke_access(state)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    is_over.set()
    holder.join()

    assert 0 == ended
