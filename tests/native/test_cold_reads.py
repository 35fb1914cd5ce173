"""Pages that are not in the page cache: they are read around it, by several threads of a call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import page_cache
import pytest
import xxhash
from data_planes import NEEDS_COMPILED, compiled

from hicache_storage.native import HIT, LATE, MISS, REVOKED, WRONG

pytestmark = NEEDS_COMPILED

NAME = b"HiPg" + bytes([1, 0, 0, 0]) + bytes(32)
NBYTES = (1 << 20) + 128
PAGES = 9
RUN = bytearray(1)
SOON_S = 3600.0


@pytest.fixture(autouse=True)
def _on_a_disk(tmp_path: Path) -> None:
    page_cache.require(tmp_path)


def content(number: int, nbytes: int = NBYTES) -> bytes:
    return (bytes(range(number, 251)) * (nbytes // (251 - number) + 1))[:nbytes]


def trailer(nonce: int = 0) -> bytes:
    body = NAME + bytes(1) + nonce.to_bytes(15, "little")
    return body + xxhash.xxh3_64_digest(body)


def stored(folder: Path, nbytes: int = NBYTES, pages: int = PAGES) -> list[Path]:
    """Write pages, and drop them from the page cache."""
    paths = [folder / str(number) for number in range(pages)]
    for number, path in enumerate(paths):
        path.write_bytes(content(number, nbytes) + trailer())
        page_cache.drop(path)
    return paths


def read(
    paths: Sequence[Path],
    *,
    nbytes: int = NBYTES,
    skip: int = -1,
    states: Sequence[bytearray] = (),
    until_s: float | None = None,
) -> tuple[list[int], list[int], list[bytearray]]:
    memory = [bytearray(nbytes) for _ in paths]
    verdicts, digests = compiled.read_files(
        [os.fsencode(path) for path in paths],
        [NAME] * len(paths),
        [[memoryview(page)[:100], memoryview(page)[100:]] for page in memory],
        nbytes,
        -1,
        0,
        skip,
        time.monotonic() + SOON_S if until_s is None else until_s,
        states,
    )
    return verdicts, digests, memory


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 70_000, NBYTES, (1 << 20) + 8192, (5 << 20) + 77])
@pytest.mark.parametrize("lent", [0, 3])
def test_cold_pages_are_read(tmp_path: Path, nbytes: int, lent: int) -> None:
    paths = stored(tmp_path, nbytes, 3)
    states = [bytearray(8) for _ in range(lent)]
    before = threads()

    verdicts, digests, memory = read(paths, nbytes=nbytes, skip=min(nbytes, 130), states=states)

    pages = [content(number, nbytes) for number in range(3)]
    assert [HIT] * 3 == verdicts
    assert pages == [*map(bytes, memory)]
    assert [xxhash.xxh3_64_intdigest(page[130:]) for page in pages] == digests
    assert before == threads()


def test_a_page_is_cached_when_it_is_read_again(tmp_path: Path) -> None:
    (path,) = stored(tmp_path, pages=1)

    read([path])
    assert not page_cache.has(path)
    read([path])
    assert page_cache.has(path, NBYTES - 1)


def test_cold_pages_among_cached_ones_are_read(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    for path in paths[::2]:
        path.read_bytes()

    verdicts, _, memory = read(paths, states=[bytearray(8)] * PAGES)

    assert [HIT] * PAGES == verdicts
    assert [content(number) for number in range(PAGES)] == memory


def test_damaged_missing_and_short_files_are_no_hits(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    paths[1].write_bytes(content(1) + trailer()[:-1] + b"\xff")
    paths[3].unlink()
    os.truncate(paths[5], NBYTES // 2)
    os.truncate(paths[7], NBYTES + 63)
    for number in (1, 5, 7):
        page_cache.drop(paths[number])

    assert [HIT, WRONG, HIT, MISS, HIT, WRONG, HIT, WRONG, HIT] == read(paths)[0]


def test_a_page_that_was_revoked_before_stays_as_it_is(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    states = [bytearray(8) for _ in paths]
    compiled.revoke_access(states[4])

    verdicts, _, memory = read(paths, states=states)

    assert [HIT] * 4 + [REVOKED] + [HIT] * 4 == verdicts
    assert not any(memory[4])


def test_nothing_is_read_into_memory_that_is_revoked_in_the_middle(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    found: set[int] = set()
    for attempt in range(12):
        memory = [bytearray(NBYTES) for _ in paths]
        state = bytearray(8)
        verdicts: list[int] = []

        def load(memory: list[bytearray] = memory, state: bytearray = state) -> None:
            names, deadline_s = [NAME] * PAGES, time.monotonic() + SOON_S
            pages = [[page] for page in memory]
            verdicts.extend(  # noqa: B023 - the thread ends in this round
                compiled.read_files(
                    list(map(os.fsencode, paths)),
                    names,
                    pages,
                    NBYTES,
                    -1,
                    0,
                    0,
                    deadline_s,
                    [state] * PAGES,
                )[0]
            )

        for path in paths:
            page_cache.drop(path, sync=False)
        loading = threading.Thread(target=load)
        loading.start()
        time.sleep(attempt / 4000)
        compiled.revoke_access(state)
        for page in memory:
            page[:] = b"\xff" * NBYTES
        loading.join()

        found.update(verdicts)
        assert all(NBYTES == page.count(0xFF) for page in memory)
    assert REVOKED in found
    assert found <= {REVOKED, HIT}


def test_pages_after_the_deadline_are_late(tmp_path: Path) -> None:
    paths = stored(tmp_path)

    assert [LATE] * PAGES == read(paths, until_s=0.0)[0]


def test_a_deadline_in_the_middle_leaves_whole_pages(tmp_path: Path) -> None:
    paths = stored(tmp_path)

    verdicts, _, memory = read(paths, until_s=time.monotonic() + 0.001)

    assert set(verdicts) <= {HIT, LATE}
    for number, (verdict, page) in enumerate(zip(verdicts, memory, strict=True)):
        assert page == (content(number) if verdict == HIT else bytes(NBYTES))


def test_a_page_that_is_overwritten_meanwhile_is_no_half_page(tmp_path: Path) -> None:
    """A thread overwrites a file again and again, each time with other bytes and a new nonce."""
    (path,) = stored(tmp_path, pages=1)
    source, over = path.with_suffix(".old"), threading.Event()
    path.write_bytes(b"\1" * NBYTES + trailer())

    def overwrite() -> None:
        for nonce in range(2, 1000):
            if over.is_set():
                return
            path.rename(source)
            compiled.write_files(
                [os.fsencode(source)],
                [os.fsencode(path)],
                [trailer(nonce)],
                [[bytes([nonce % 251]) * NBYTES]],
                NBYTES,
                1,
                1,
                time.monotonic() + SOON_S,
                RUN,
            )

    writing = threading.Thread(target=overwrite)
    writing.start()
    hits = 0
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        try:
            page_cache.drop(path)
        except FileNotFoundError:
            continue
        verdicts, _, (memory,) = read([path])
        if verdicts == [HIT]:
            hits += 1
            assert NBYTES == memory.count(memory[0])
    over.set()
    writing.join()
    assert hits


def test_a_child_that_is_forked_meanwhile_reads_cold_pages(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    wanted = [content(number) for number in range(PAGES)]
    over, answers = threading.Event(), list[bool]()

    def load() -> None:
        while not over.is_set():
            for path in paths:
                page_cache.drop(path, sync=False)
            answers.append(read(paths)[2] == wanted)

    loading = threading.Thread(target=load)
    loading.start()
    codes: list[int] = []
    for _ in range(5):
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(int(read(paths)[2] != wanted))
        codes.append(os.waitpid(child, 0)[1])
    over.set()
    loading.join()

    assert [0] * 5 == codes
    assert answers
    assert all(answers)


_ALONE = """
import os, sys, time
from hicache_storage.native import _native
paths = [os.fsencode(path) for path in sys.argv[1:]]
memory = [bytearray(NBYTES) for _ in paths]
verdicts, _ = _native.read_files(
    paths, [NAME] * len(paths), [[page] for page in memory], NBYTES, -1, 0, 0, time.monotonic() + 60,
    [bytearray(8)] * len(paths),
)
os.write(1, bytes(verdicts) + b"".join(memory))
"""


def test_without_o_direct_and_threads_cold_pages_are_read(tmp_path: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        pytest.skip(f"there is no C compiler ({compiler})")
    shim, source = tmp_path / "system.so", Path(__file__).with_name("unhelpful_system.c")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", shim], check=True)
    paths = stored(tmp_path, pages=3)

    script = _ALONE.replace("NBYTES", str(NBYTES)).replace("NAME", repr(NAME))
    preloaded = ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(shim)])
    done = subprocess.run(
        [sys.executable, "-c", script, *paths],
        env={**os.environ, "LD_PRELOAD": preloaded},
        stdout=subprocess.PIPE,
        check=True,
    )

    assert bytes([HIT] * 3) + b"".join(map(content, range(3))) == done.stdout
    assert all(page_cache.has(path) for path in paths)
