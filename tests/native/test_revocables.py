"""Revocable memory: the data plane touches no byte of it once `revoke_access` has returned."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import xxhash
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_files import (
    ALL,
    BLOCK_NBYTES,
    MARK_NBYTES,
    cut,
    files_of,
    mark_of,
    page_of,
    slot_of,
    soon,
)

from hicache_storage.native import HIT, LATE, MISS, REVOKED, WRONG, reference
from hicache_storage.native.reference import revocables
from hicache_storage.native.reference.revocables import CHUNK_NBYTES

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


@pytest.mark.parametrize("cached_nbytes", [0, CHUNK_NBYTES + 4096])
def test_a_page_outside_the_page_cache_is_read(
    module: Any, tmp_path: Path, cached_nbytes: int
) -> None:
    page, path, memory = content(NBYTES), tmp_path / "page", bytearray(NBYTES)
    path.write_bytes(page + trailer())
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), cached_nbytes, 0, os.POSIX_FADV_DONTNEED)

    assert (HIT, xxhash.xxh3_64_intdigest(page[1:])) == read(
        module, path, [memory], bytearray(8), skip=1
    )
    assert page == memory


def test_a_page_is_read_where_the_kernel_refuses_to_say_what_it_has(module: Any) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("this machine has no tmpfs, which refuses RWF_NOWAIT")
    page, memory = content(NBYTES), bytearray(NBYTES)
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "page"
        path.write_bytes(page + trailer())

        verdict, digest = read(module, path, [memory], bytearray(8), skip=0)

    assert (HIT, xxhash.xxh3_64_intdigest(page)) == (verdict, digest)
    assert page == memory


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


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_NBYTES, NBYTES])
def test_pages_are_copied_between_any_pieces(module: Any, nbytes: int) -> None:
    page = content(nbytes)
    targets = [bytearray(nbytes // 3), bytearray(0), bytearray(nbytes - nbytes // 3)]
    plain = [bytearray(nbytes)]
    sources = [page[: nbytes // 2], page[nbytes // 2 :]]

    states = [bytearray(8), bytearray()]

    for far, skip in itertools.product((False, True), (-1, 0, 77)):
        found = module.copy_revocable([targets, plain], [sources, sources], states, skip, far)

        digest = xxhash.xxh3_64_intdigest(page[skip:]) if skip >= 0 else 0
        assert ([HIT, HIT], [digest, digest]) == found
        assert [page, page] == [b"".join(targets), b"".join(plain)]
        for target in (*targets, *plain):
            target[:] = bytes(len(target))


def test_a_page_that_was_revoked_before_is_not_copied(module: Any) -> None:
    pages = [[bytearray(9)], [bytearray(9)]]
    states = [revoked(module), bytearray(8)]

    digest = xxhash.xxh3_64_intdigest(content(9))
    found = module.copy_revocable(pages, [[content(9)]] * 2, states, 0)

    assert ([REVOKED, HIT], [0, digest]) == found
    assert [bytes(9), content(9)] == [bytes(page) for (page,) in pages]
    assert bytearray(8) == states[1]


def test_pages_of_other_sizes_are_not_copied(module: Any) -> None:
    target = bytearray(9)
    with pytest.raises(ValueError, match="do not fit together"):
        module.copy_revocable([[target]], [[content(8)]], [bytearray(8)])

    assert not any(target)


def test_nothing_is_read_into_revoked_memory_under_load(module: Any, tmp_path: Path) -> None:
    """Reads run in another thread, while this thread revokes the memory and then watches it."""
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

    holder = threading.Thread(target=hold)  # the child does not have this thread
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


# Slots of revocable memory: the data plane touches no byte of it once `revoke_access` has returned.

SHAPE = (BLOCK_NBYTES, 3 * CHUNK_NBYTES, BLOCK_NBYTES)


def states_of(module: Any, kinds: Sequence[str]) -> list[bytearray]:
    return [
        {"plain": bytearray(), "lent": bytearray(8), "revoked": revoked(module)}[kind]
        for kind in kinds
    ]


def write_slots(
    module: Any,
    path: Path,
    pages: list[list[bytearray]],
    states: list[bytearray],
    shape: tuple[int, int, int] = SHAPE,
    *,
    run_nbytes: int = CHUNK_NBYTES,
    alignment: int = 1,
    flags: int = os.O_RDWR | os.O_CREAT,
    deadline_s: float | None = None,
) -> list[int]:
    """Write pages to the slots from the first on."""
    count = len(pages)
    verdicts: list[int] = module.write_slots(
        files_of(path, flags),
        [0] * count,
        [number * sum(shape) for number in range(count)],
        pages,
        [mark_of(number) for number in range(count)],
        shape,
        alignment,
        run_nbytes,
        ALL,
        soon() if deadline_s is None else deadline_s,
        states,
    )
    return verdicts


def read_slots(
    module: Any,
    path: Path,
    pages: list[list[bytearray]],
    states: list[bytearray],
    shape: tuple[int, int, int] = SHAPE,
    *,
    skip: int = -1,
    run_nbytes: int = CHUNK_NBYTES,
    alignment: int = 1,
    flags: int = os.O_RDONLY,
    deadline_s: float | None = None,
) -> tuple[list[int], list[int]]:
    """Read pages from the slots from the first on."""
    count = len(pages)
    found: tuple[list[int], list[int]] = module.read_slots(
        files_of(path, flags),
        [0] * count,
        [number * sum(shape) for number in range(count)],
        pages,
        [mark_of(number) for number in range(count)],
        shape,
        alignment,
        run_nbytes,
        ALL,
        skip,
        soon() if deadline_s is None else deadline_s,
        states,
    )
    return found


shapes = st.tuples(
    st.sampled_from([MARK_NBYTES, BLOCK_NBYTES]), st.integers(0, 3000), st.integers(128, 300)
)
kinds = st.sampled_from(["plain", "lent", "lent", "revoked"])
cuts = st.lists(st.integers(0, 3000), max_size=20)
runs = st.sampled_from([1, 700, 10_000, 8 << 20])


@NEEDS_COMPILED
@settings(max_examples=200, deadline=None)
@given(
    shape=shapes,
    slots=st.lists(st.tuples(kinds, st.booleans()), max_size=8),
    at=cuts,
    skip=st.integers(-1, 200),
    file_nbytes=st.one_of(st.none(), st.integers(0, 20_000)),
    run_nbytes=runs,
    late=st.booleans(),
)
def test_reads_of_both_are_equal(  # noqa: PLR0917 - Hypothesis passes them by name
    shape: tuple[int, int, int],
    slots: list[tuple[str, bool]],
    at: list[int],
    skip: int,
    file_nbytes: int | None,
    run_nbytes: int,
    late: bool,  # noqa: FBT001
) -> None:
    seen = list[Any]()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "slots"
        path.write_bytes(
            b"".join(
                slot_of(number, shape, wrong="" if whole else "last")
                for number, (_, whole) in enumerate(slots)
            )
        )
        if file_nbytes is not None:
            os.truncate(path, file_nbytes)
        for module in (reference, compiled):
            memory = [cut(shape[1], at) for _ in slots]
            states = states_of(module, [kind for kind, _ in slots])
            verdicts, values = read_slots(
                module,
                path,
                memory,
                states,
                shape,
                skip=skip,
                run_nbytes=run_nbytes,
                deadline_s=0.0 if late else None,
            )
            kept = [
                b"".join(page)
                for page, verdict in zip(memory, verdicts, strict=True)
                if verdict in (HIT, REVOKED)
            ]
            seen.append((verdicts, values, kept))

    assert seen[0] == seen[1]
    for number, ((kind, _), verdict, value) in enumerate(zip(slots, *seen[0][:2], strict=True)):
        assert (verdict == REVOKED) is (kind == "revoked" and not late)
        if verdict == HIT and skip >= 0:
            assert xxhash.xxh3_64_intdigest(page_of(number, shape[1])[skip:]) == value
    assert all(not any(page) for page, verdict in _zipped(seen[0]) if verdict == REVOKED)


def _zipped(found: tuple[list[int], list[int], list[bytes]]) -> list[tuple[bytes, int]]:
    verdicts = [verdict for verdict in found[0] if verdict in (HIT, REVOKED)]
    return list(zip(found[2], verdicts, strict=True))


@NEEDS_COMPILED
@settings(max_examples=100, deadline=None)
@given(
    shape=shapes,
    slots=st.lists(kinds, max_size=8),
    at=cuts,
    run_nbytes=runs,
    late=st.booleans(),
    read_only=st.booleans(),
)
def test_writes_of_both_are_equal(  # noqa: PLR0917 - Hypothesis passes them by name
    shape: tuple[int, int, int],
    slots: list[str],
    at: list[int],
    run_nbytes: int,
    late: bool,  # noqa: FBT001
    read_only: bool,  # noqa: FBT001
) -> None:
    seen = list[Any]()
    for module in (reference, compiled):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "slots"
            path.touch()
            verdicts = write_slots(
                module,
                path,
                [cut(shape[1], at, page_of(number, shape[1])) for number in range(len(slots))],
                states_of(module, slots),
                shape,
                run_nbytes=run_nbytes,
                flags=os.O_RDONLY if read_only else os.O_RDWR,
                deadline_s=0.0 if late else None,
            )
            seen.append((verdicts, path.read_bytes()))

    assert seen[0] == seen[1]
    for number, verdict in enumerate(seen[0][0]):
        stored = seen[0][1][number * sum(shape) : (number + 1) * sum(shape)]
        assert (verdict == HIT) is (stored == slot_of(number, shape))


@pytest.mark.parametrize("skip", [-1, 0, CHUNK_NBYTES + 3])
@pytest.mark.parametrize("run_nbytes", [CHUNK_NBYTES, 8 << 20])
def test_large_pages_are_written_and_read(
    module: Any, tmp_path: Path, run_nbytes: int, skip: int
) -> None:
    sources = [cut(SHAPE[1], [5, 400_000], page_of(number, SHAPE[1])) for number in range(3)]
    targets = [cut(SHAPE[1], [7, 300_001, 300_002]) for _ in sources]
    states = [bytearray(8) for _ in sources]
    path = tmp_path / "slots"

    assert [HIT] * 3 == write_slots(module, path, sources, states, run_nbytes=run_nbytes)
    verdicts, values = read_slots(module, path, targets, states, run_nbytes=run_nbytes, skip=skip)

    assert [HIT] * 3 == verdicts
    assert b"".join(slot_of(number, SHAPE) for number in range(3)) == path.read_bytes()
    assert [page_of(number, SHAPE[1]) for number in range(3)] == [
        b"".join(page) for page in targets
    ]
    if skip >= 0:
        assert [xxhash.xxh3_64_intdigest(page_of(n, SHAPE[1])[skip:]) for n in range(3)] == values


def test_unaligned_revocable_memory_is_moved_around_the_page_cache(
    module: Any, tmp_path: Path
) -> None:
    path = tmp_path / "slots"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    sources = [cut(SHAPE[1], [5], page_of(number, SHAPE[1])) for number in range(9)]
    targets = [cut(SHAPE[1], [777]) for _ in sources]
    states = [bytearray(8), bytearray(), bytearray(8)] * 3
    place: dict[str, Any] = {"alignment": BLOCK_NBYTES, "flags": os.O_RDWR | os.O_DIRECT}

    assert [HIT] * 9 == write_slots(module, path, sources, states, **place)
    assert [HIT] * 9 == read_slots(module, path, targets, states, **place)[0]
    assert [page_of(number, SHAPE[1]) for number in range(9)] == [
        b"".join(page) for page in targets
    ]


@pytest.mark.parametrize("state", [bytearray(7), bytearray(9)])
def test_a_state_of_slots_has_8_bytes(module: Any, tmp_path: Path, state: bytearray) -> None:
    for function in (read_slots, write_slots):
        with pytest.raises(ValueError, match=r".+"):
            function(module, tmp_path / "slots", [cut(SHAPE[1], [])], [state])
        with pytest.raises(ValueError, match=r".+"):
            function(module, tmp_path / "slots", [cut(SHAPE[1], [])], [bytearray(8)] * 2)


def test_after_the_deadline_every_page_is_late(module: Any, tmp_path: Path) -> None:
    states = [revoked(module), bytearray(8)]
    pages = [cut(SHAPE[1], []) for _ in states]

    assert [LATE] * 2 == write_slots(module, tmp_path / "slots", pages, states, deadline_s=0.0)
    assert [LATE] * 2 == read_slots(module, tmp_path / "slots", pages, states, deadline_s=0.0)[0]


@pytest.mark.parametrize("run_nbytes", [CHUNK_NBYTES, 8 << 20])
def test_nothing_is_read_into_memory_that_is_revoked_during_reads(
    module: Any, tmp_path: Path, run_nbytes: int
) -> None:
    path = tmp_path / "slots"
    path.write_bytes(b"".join(slot_of(number, SHAPE) for number in range(3)))
    for attempt in range(20):
        state = bytearray(8)
        memory = [bytearray(SHAPE[1]) for _ in range(3)]
        seen: list[list[int]] = []

        def read_until_revoked(
            state: bytearray = state,
            memory: list[bytearray] = memory,
            seen: list[list[int]] = seen,
        ) -> None:
            pages = [[page] for page in memory]
            while not seen or seen[-1] == [HIT] * 3:
                seen.append(read_slots(module, path, pages, [state] * 3, run_nbytes=run_nbytes)[0])

        reading = threading.Thread(target=read_until_revoked)
        reading.start()
        time.sleep(attempt / 10_000)
        module.revoke_access(state)
        for page in memory:
            page[:] = b"\xff" * len(page)
        reading.join()

        assert set(seen[-1]) <= {HIT, REVOKED}
        assert [SHAPE[1]] * 3 == [page.count(0xFF) for page in memory]


@pytest.mark.parametrize("run_nbytes", [CHUNK_NBYTES, 8 << 20])
def test_a_slot_that_is_whole_has_the_page_of_before_the_revoke(
    module: Any, tmp_path: Path, run_nbytes: int
) -> None:
    path = tmp_path / "slots"
    for attempt in range(20):
        path.write_bytes(bytes(3 * sum(SHAPE)))
        state = bytearray(8)
        memory = [bytearray(page_of(number, SHAPE[1])) for number in range(3)]
        seen: list[int] = []

        def write_once(
            state: bytearray = state,
            memory: list[bytearray] = memory,
            seen: list[int] = seen,
        ) -> None:
            pages = [[page] for page in memory]
            seen += write_slots(module, path, pages, [state] * 3, run_nbytes=run_nbytes)

        writing = threading.Thread(target=write_once)
        writing.start()
        time.sleep(attempt / 20_000)
        module.revoke_access(state)
        for page in memory:
            page[:] = b"\xff" * len(page)
        writing.join()
        found = [cut(SHAPE[1], []) for _ in memory]
        verdicts, _ = read_slots(module, path, found, [])

        assert [{HIT: HIT, REVOKED: WRONG}[verdict] for verdict in seen] == verdicts
        for number, verdict in enumerate(verdicts):
            assert verdict != HIT or page_of(number, SHAPE[1]) == b"".join(found[number])


def test_a_page_that_was_revoked_before_is_not_begun(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "slots"
    path.touch()

    assert [REVOKED] == write_slots(module, path, [cut(SHAPE[1], [])], [revoked(module)])
    assert b"" == path.read_bytes()


def test_missing_files_are_reported_for_lent_pages(module: Any, tmp_path: Path) -> None:
    pages = [cut(SHAPE[1], []) for _ in range(2)]
    (verdicts, _) = read_slots(
        module, tmp_path / "none", pages, [bytearray(8), revoked(module)], skip=0
    )

    assert verdicts[0] < MISS
    assert REVOKED == verdicts[1]
