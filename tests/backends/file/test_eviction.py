"""Eviction of the `file` backend: sweeps that find the oldest pages, and counts of all pages."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage, eviction
from hicache_backends.file.eviction import EvictionSweep, Victim
from hicache_backends.file.layout import Layout
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage import native
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.native.reference import directories, files

NBYTES = 64
SPACE = space(page_nbytes=NBYTES)
FILE_NBYTES = NBYTES + TRAILER_NBYTES
ONE = page(NBYTES)
LIMIT_S = 60.0


def opened(root: Path, pages: int | None, **config: Any) -> FileStorage:
    limit = {} if pages is None else {"capacity_nbytes": pages * FILE_NBYTES}
    storage = FileStorage.from_config({"path": str(root), **limit, **config})
    storage.open_space(SPACE)
    return storage


def put(storage: FileStorage, numbers: range) -> list[bool]:
    return storage.batch_set(SPACE, [hash_of(n) for n in numbers], [ONE] * len(numbers))


def there(storage: FileStorage, numbers: Sequence[int]) -> list[int]:
    present = storage.batch_exists(SPACE, [hash_of(n) for n in numbers])
    return [n for n, is_there in zip(numbers, present, strict=True) if is_there]


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_looks_do_not_grow_with_the_ranks_that_share_a_full_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The ranks evict 2,400 of the 6,000 pages, and look at four pages or fewer for each eviction."""
    looked_at = 0
    real = native.stat_files

    def looking(paths: list[bytes], deadline_s: float) -> Any:
        nonlocal looked_at
        looked_at += len(paths)
        return real(paths, deadline_s)

    with opened(tmp_path, None) as filling:
        for first in range(0, 6000, 500):
            assert all(put(filling, range(first, first + 500)))
    stores = [opened(tmp_path, 6000) for _ in range(ranks)]
    monkeypatch.setattr(native, "stat_files", looking)
    for turn in range(120):
        first = 10_000 + 20 * turn
        assert all(put(stores[turn % ranks], range(first, first + 20)))
    for storage in stores:
        storage.close()

    assert looked_at <= 2400 * 4 + ranks * 6000


def test_the_oldest_pages_go_first_whichever_rank_evicts(tmp_path: Path) -> None:
    with opened(tmp_path, 60) as one, opened(tmp_path, 60) as other:
        for number in range(60):
            put(one, range(number, number + 1))
        for number in range(60, 90):
            assert [True] == put(other if number % 2 else one, range(number, number + 1))
        kept = there(one, range(90))

        assert set(range(60, 90)) <= set(kept)
        assert sum(n < 20 for n in kept) <= 4


@pytest.mark.parametrize("pages", [4, 100, 1000])
def test_a_sweep_of_a_small_store_finds_its_pages_in_order(tmp_path: Path, pages: int) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(pages))  # the first page of a batch is the newest
        capacity = storage._process.get().capacity
        found = capacity._count_sweep.sweep()
        taken = capacity._sweep.take(2 * FILE_NBYTES, Deadline(LIMIT_S))

    names = [victim.path.rpartition("/")[2] for victim in found]
    assert [hash_of(number) for number in reversed(range(pages))] == names
    if pages <= 100:
        assert found[:2] == taken


def test_the_oldest_pages_of_a_large_store_go_first(tmp_path: Path) -> None:
    """5,000 pages are more than a sweep remembers, so each eviction has seen only a part of them."""
    with opened(tmp_path, 5000) as storage:
        for first in range(0, 5000, 50):
            assert all(put(storage, range(first, first + 50)))
        storage._process.get().capacity._sweep._candidates.clear()
        for first in range(5000, 6000, 50):
            assert all(put(storage, range(first, first + 50)))

        assert len(there(storage, range(3000, 6000))) == 3000
        assert len(there(storage, range(1000))) <= 400


def large_sweep(storage: FileStorage, monkeypatch: pytest.MonkeyPatch) -> EvictionSweep:
    """Return the sweep of a storage, made to treat a store of ten pages as a large one."""
    monkeypatch.setattr(eviction, "_MOST_CANDIDATES", 8)
    monkeypatch.setattr(eviction, "_PAGES_A_LISTING", 4)
    sweep = storage._process.get().capacity._sweep
    sweep._is_large = True
    return sweep


def test_processes_share_the_sweep_over_a_large_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 400) as one, opened(tmp_path, 400) as other:
        put(one, range(400))
        (tmp_path / "survey" / "turn").write_bytes((250).to_bytes(8, "little"))
        turns = [large_sweep(one, monkeypatch)._take_turn() for one in (one, other, one)]

    assert [250, 254, 2] == turns
    assert 8 == (tmp_path / "survey" / "turn").stat().st_size


@pytest.mark.parametrize("content", [b"notes", b"my notes on turns"])
def test_a_turn_of_another_program_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    with opened(tmp_path, 400) as storage:
        (tmp_path / "survey" / "turn").write_bytes(content)
        sweep = large_sweep(storage, monkeypatch)
        first, second = sweep._take_turn(), sweep._take_turn()

    assert (first + 4) % 256 == second
    assert content == (tmp_path / "survey" / "turn").read_bytes()


def test_a_store_that_became_small_is_swept_by_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 400) as storage:
        put(storage, range(3))
        sweep = large_sweep(storage, monkeypatch)

        assert 3 == len(sweep.take(400 * FILE_NBYTES, Deadline(LIMIT_S)))
        assert not sweep._is_large


def test_pages_of_any_time_are_found_in_order(tmp_path: Path) -> None:
    times_ns = [5 * 10**9, -(10**9), 2**60, 10**9]
    with opened(tmp_path, None) as storage:
        put(storage, range(4))
        for number, modified_ns in enumerate(times_ns):
            name = hash_of(number)
            path = tmp_path / "spaces" / SPACE.id / name[:2] / name
            os.utime(path, ns=(modified_ns, modified_ns))
        found = storage._process.get().capacity._count_sweep.sweep()

    assert sorted(times_ns) == [victim.modified_ns for victim in found]
    assert {FILE_NBYTES} == {victim.nbytes for victim in found}
    assert [hash_of(number) for number in (1, 3, 0, 2)] == [
        victim.path.rpartition("/")[2] for victim in found
    ]


def test_candidates_are_taken_up_to_a_sum_of_bytes_and_put_back_in_order(tmp_path: Path) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(6))
        sweep = storage._process.get().capacity._sweep
        taken = sweep.take(2 * FILE_NBYTES + 1, Deadline(LIMIT_S))
        sweep.put_back(taken[1:], 0)
        rest = sweep.take(100 * FILE_NBYTES, Deadline(LIMIT_S))

    assert 3 == len(taken)
    assert [*taken, *rest[2:]] == sorted({*taken, *rest})
    assert taken[1:] == rest[:2]
    assert 5 == len(rest)


def test_a_candidate_that_was_used_since_stays(tmp_path: Path) -> None:
    with opened(tmp_path, 20) as storage:
        for number in range(21):
            put(storage, range(number, number + 1))
        put(storage, range(1, 2))
        put(storage, range(30, 45))
        assert [1] == there(storage, range(1, 3))


def test_new_pages_end_the_pause_after_a_sweep_without_pages(tmp_path: Path) -> None:
    with opened(tmp_path, None) as storage:
        sweep = storage._process.get().capacity._sweep
        assert [] == sweep.take(1, Deadline(LIMIT_S))
        assert sweep._empty_until_s > time.monotonic()
        put(storage, range(1))

        assert 1 == len(sweep.take(1, Deadline(LIMIT_S)))


def test_a_sweep_whose_pages_others_evict_meanwhile_has_not_found_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(6))
        sweep = storage._process.get().capacity._sweep
        look = native.stat_files

        def late(paths: list[bytes], deadline_s: float) -> Any:
            """Let other pages take the place of those that were listed, during the first sweep."""
            for path in [Path(os.fsdecode(one)) for one in paths if not sweep.sweeps]:
                path.rename(path.with_name(path.name[:-1] + "01"[path.name[-1] == "0"]))
            return look(paths, deadline_s)

        monkeypatch.setattr(native, "stat_files", late)

        assert 1 == len(sweep.take(1, Deadline(LIMIT_S)))


def test_a_store_that_is_counted_by_many_at_once_is_counted_by_the_first(tmp_path: Path) -> None:
    with opened(tmp_path, 4) as storage:
        put(storage, range(1))
        with opened(tmp_path, 4) as other:
            assert other._process.get().capacity._counting is None


def test_a_count_whose_process_died_keeps_no_other_from_counting(tmp_path: Path) -> None:
    """`survey` is new, so a count has just begun. `usage` is missing, so none has ended."""
    with opened(tmp_path, None) as storage:
        put(storage, range(4))
    (tmp_path / "survey").mkdir(exist_ok=True)
    (tmp_path / "usage").unlink()
    with opened(tmp_path, 4) as storage:
        assert all(put(storage, range(10, 14)))
        assert [] == there(storage, range(4))


def test_a_count_whose_thread_could_not_start_is_started_by_the_next_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may reach its limit of threads for a while."""
    with opened(tmp_path, None) as storage:
        put(storage, range(1))
    with opened(tmp_path, 4) as storage:
        (tmp_path / "usage").unlink()

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                put(storage, range(1, 2))

        assert [True] == put(storage, range(1, 2))


def one_directory(layout: Layout, shards: list[str]) -> Iterator[str]:
    """List all pages as if they were in one directory."""
    if "00" not in shards:
        return
    directory = layout.space_dir(SPACE.id)
    for hashes in layout.pages(SPACE.id):
        yield from (f"{directory}/{page_hash[:2]}/{page_hash}" for page_hash in hashes)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event. Until it is set, no count of the pages makes progress."""
    opening = threading.Event()
    sweep = EvictionSweep.sweep

    def waiting(self: EvictionSweep) -> list[Victim]:
        assert opening.wait(LIMIT_S)
        return sweep(self)

    monkeypatch.setattr(EvictionSweep, "sweep", waiting)
    yield opening
    opening.set()


def test_a_full_store_takes_writes_while_its_first_count_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as filling:
        for number in range(0, 400, 4):
            put(filling, range(number, number + 4))
    with opened(tmp_path, 400, timeout_s=LIMIT_S) as storage:
        assert all(all(put(storage, range(n, n + 4))) for n in range(1000, 1100, 4))
        assert "evicted" in storage.stats().counters
        kept = there(storage, range(400))
        assert len([n for n in kept if n >= 200]) >= 190
        gate.set()


@pytest.mark.usefixtures("python_data_plane")
def test_a_sample_of_a_slow_file_system_is_part_of_the_sets_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """A look at all 400 pages of the directory would take 8 s, but the set has 4 s."""
    with opened(tmp_path, None) as filling:
        put(filling, range(400))
    looks = 0
    look = directories._stat

    def looked_at_slowly(path: bytes) -> tuple[int, int, int]:
        nonlocal looks
        looks += 1
        time.sleep(0.02)
        return look(path)

    monkeypatch.setattr(directories, "_stat", looked_at_slowly)
    monkeypatch.setattr(Layout, "pages_in", one_directory)
    with opened(tmp_path, 400, timeout_s=4) as storage:
        assert [True] == put(storage, range(1000, 1001))
        assert 1 <= looks <= 200
        gate.set()


def test_an_eviction_from_a_large_store_looks_at_a_part_of_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as filling:
        put(filling, range(400))
    looked_at = list[int]()
    real = native.stat_files

    def looking(paths: list[bytes], deadline_s: float) -> Any:
        looked_at.append(len(paths))
        return real(paths, deadline_s)

    monkeypatch.setattr(eviction, "_PAGES_A_LOOK", 80)
    monkeypatch.setattr(eviction, "_MOST_CANDIDATES", 40)
    monkeypatch.setattr(native, "stat_files", looking)
    monkeypatch.setattr(Layout, "pages_in", one_directory)
    with opened(tmp_path, 400, timeout_s=LIMIT_S) as storage:
        assert [True] == put(storage, range(1000, 1001))
        assert [80] == looked_at
        gate.set()


@pytest.mark.usefixtures("python_data_plane")
def test_a_batch_that_evicts_slowly_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eviction of all 200 pages would take 10 s."""
    with opened(tmp_path, None) as filling:
        put(filling, range(200))
    claims = 0
    claim = files._claim

    def slowly(*args: Any, **options: Any) -> int:
        nonlocal claims
        claims += 1
        time.sleep(0.05)
        return claim(*args, **options)

    monkeypatch.setattr(files, "_claim", slowly)
    with opened(tmp_path, 200, timeout_s=4) as storage:
        stored = put(storage, range(1000, 1200))
        assert any(stored)
        assert claims <= 100
        assert storage.stats().counters["timeouts"] == stored.count(False) >= 100
        assert storage.stats().counters["evicted"] == claims


def test_a_lost_usage_does_not_delay_opening_where_nothing_is_limited(
    tmp_path: Path, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(10))
    (tmp_path / "usage").unlink()
    with opened(tmp_path, None) as storage:
        assert all(put(storage, range(10, 20)))
        assert (tmp_path / "usage").stat().st_size == 0
        gate.set()
        wait_until(lambda: (tmp_path / "usage").stat().st_size == 16)
        assert (storage.stats().nbytes or 0) >= 20 * FILE_NBYTES


def test_a_lost_usage_never_lets_a_store_exceed_its_capacity(
    tmp_path: Path, gate: threading.Event
) -> None:
    with opened(tmp_path, None) as storage:
        put(storage, range(10))
    (tmp_path / "usage").unlink()
    with opened(tmp_path, 12, timeout_s=0.5) as storage:
        assert [False] * 4 == put(storage, range(10, 14))
        assert {"timeouts": 4} == dict(storage.stats().counters)
        gate.set()
        wait_until(lambda: put(storage, range(10, 14)) == [True] * 4)
        assert 12 >= len(there(storage, range(20)))


def path_of(root: Path, number: int) -> Path:
    name = hash_of(number)
    return root / "spaces" / SPACE.id / name[:2] / name


@pytest.mark.parametrize("most_candidates", [eviction._MOST_CANDIDATES, 40])
def test_pages_of_the_future_are_gone_after_one_turnover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_candidates: int
) -> None:
    """With 40 candidates, 300 pages are a large store, in which the newest are no candidates."""
    monkeypatch.setattr(eviction, "_MOST_CANDIDATES", most_candidates)
    with opened(tmp_path, 300) as storage:
        put(storage, range(300))
        for number in range(30):
            os.utime(path_of(tmp_path, number), (4102444800, 4102444800))
        for start in range(300, 600, 10):
            assert all(put(storage, range(start, start + 10)))

        assert [] == there(storage, range(30))


def test_pages_that_are_used_after_a_clock_was_set_back_stay(tmp_path: Path) -> None:
    """All 100 pages were used an hour ahead. Half of them are read now, and no other ones."""
    with opened(tmp_path, 100) as storage:
        put(storage, range(100))
    ahead_s = time.time() + 3600
    for number in range(100):
        os.utime(path_of(tmp_path, number), (ahead_s, ahead_s))
    with opened(tmp_path, 100) as storage:
        blanks = [blank(NBYTES) for _ in range(50)]
        assert all(storage.batch_get(SPACE, [hash_of(n) for n in range(50)], blanks))
        put(storage, range(100, 130))
        assert [*range(50), *range(100, 130)] == there(storage, [*range(50), *range(100, 130)])
        assert 20 == len(there(storage, range(50, 100)))


def test_pages_that_are_used_after_a_small_step_back_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, 100) as storage:
        put(storage, range(100))
    ahead_s = time.time() + 200
    for number in range(100):
        os.utime(path_of(tmp_path, number), (ahead_s, ahead_s))
    monkeypatch.setattr("hicache_backends.file.capacity._FRESH_S", 0)  # a long time has passed
    with opened(tmp_path, 100) as storage:
        blanks = [blank(NBYTES) for _ in range(50)]
        storage._process.get().capacity._count().join()
        assert all(storage.batch_get(SPACE, [hash_of(n) for n in range(50)], blanks))
        put(storage, range(100, 130))
        assert [*range(50), *range(100, 130)] == there(storage, [*range(50), *range(100, 130)])


@pytest.mark.parametrize("behind_s", [-100, -3600, 3600])
def test_a_host_with_another_clock_uses_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind_s: int
) -> None:
    real_ns = time.time_ns
    with opened(tmp_path, 100) as storage:
        put(storage, range(100))
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() - behind_s * 10**9)
        with opened(tmp_path, 100) as other:
            blanks = [blank(NBYTES) for _ in range(50)]
            assert all(other.batch_get(SPACE, [hash_of(n) for n in range(50)], blanks))
        monkeypatch.undo()

        put(storage, range(100, 130))
        assert [*range(50), *range(100, 130)] == there(storage, [*range(50), *range(100, 130)])
        assert time.time() + 2 > path_of(tmp_path, 0).stat().st_mtime > time.time() - 60


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("module", [native, files], ids=["compiled", "python"])
def test_the_use_of_a_page_of_another_user_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    with opened(tmp_path, 10) as storage:
        put(storage, range(1))
    path = path_of(tmp_path, 0)
    path.chmod(0o666)
    os.chown(path, 3000, 3000)
    os.utime(path, (10**9, 10**9))
    monkeypatch.chdir(path.parent)  # another user may not search the directories above
    path.parent.chmod(0o755)
    _, names = storage._files_of(SPACE).files([hash_of(0)])
    memory = [[memoryview(bytearray(NBYTES))]]
    setfsuid = ctypes.CDLL(None).setfsuid  # the user for file systems, of this thread alone
    now_ns, limit_s = time.time_ns(), time.monotonic() + 60
    try:
        setfsuid(3001)
        found = module.read_files(
            [path.name.encode()], names, memory, NBYTES, now_ns, 0, -1, limit_s
        )
    finally:
        setfsuid(0)

    assert [native.HIT] == found[0]
    assert time.time() - 60 < path.stat().st_mtime


@pytest.mark.parametrize("module", [native, files], ids=["compiled", "python"])
@pytest.mark.parametrize("ahead_s", [0, 200, 4000])
def test_a_touch_within_the_interval_renews_only_a_time_of_the_future(
    tmp_path: Path, module: Any, ahead_s: int
) -> None:
    with opened(tmp_path, 10) as storage:
        put(storage, range(1))
    set_ns = (now_ns := time.time_ns()) + ahead_s * 10**9
    os.utime(path_of(tmp_path, 0), ns=(set_ns, set_ns))
    names = storage._files_of(SPACE).files([hash_of(0)])
    memory = [[memoryview(bytearray(NBYTES))]]
    module.read_files(*names, memory, NBYTES, now_ns, 10**10, -1, time.monotonic() + 60)

    assert (now_ns if ahead_s == 4000 else set_ns) == path_of(tmp_path, 0).stat().st_mtime_ns
