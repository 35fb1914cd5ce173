"""Two disks and a bucket, on file systems that are mounted: what each accident costs, under traffic.

An engine stores and loads all the time, and compares each byte. Then it starts again, with and without
the bucket. The pages of the part that an accident strikes may be misses, and nothing else.
"""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pages import hash_of, page, space
from s3_kit import config_of
from servers import Rclone

from hicache_storage import open_storage
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer, Verdict

logger = logging.getLogger(__name__)

NBYTES = 16 << 10
SPACE = space(page_nbytes=NBYTES)
COUNT = 200
TIMEOUT_S = 10.0
TRAFFIC_S = 2.0


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Disks:
    """Two file systems in memory, and the places at which they are mounted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("d0", "d1"):
            for path in (self.raw(name), self.place(name)):
                path.mkdir()
            _run("mount", "-t", "tmpfs", "-o", "size=96m", "none", self.raw(name))
            self.mount(name, name)

    def raw(self, name: str) -> Path:
        return self.root / f"raw-{name}"

    def place(self, name: str) -> Path:
        return self.root / name

    def mount(self, disk: str, place: str) -> None:
        _run("mount", "--bind", self.raw(disk), self.place(place))

    def unmount(self, place: str) -> None:
        _run("umount", "-l", self.place(place))

    def close(self) -> None:
        for name in ("d0", "d1"):
            with suppress(subprocess.CalledProcessError):  # an accident has left it unmounted
                self.unmount(name)
            _run("umount", "-l", self.raw(name))


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    try:
        made = Disks(tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user can't mount file systems")
    yield made
    made.close()


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Rclone]:
    with Rclone(tmp_path / "bucket") as running:
        yield running


def config(disks: Disks, bucket: Rclone) -> dict[str, Any]:
    """Return the config of docs/tiers.md, at the size of this site."""
    stripes = [
        {"name": name, "backend": "file", "config": {"path": f"{disks.place(name)}/kv"}}
        for name in ("d0", "d1")
    ]
    limits = {"timeout_s": 5, "lookup_timeout_s": 5, "breaker_cooldown_s": 0.2}
    below = {"name": "bucket", "backend": "s3", "config": config_of(bucket, "pages/")}
    return {
        "tiers": [
            {"name": "nvme", "backend": "striped", "config": {"stripes": stripes, **limits}},
            below,
        ],
        "write": "back",
        **limits,
    }


class Engine:
    """An engine that compares what it loads."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.longest_s = 0.0
        self.verdicts: Counter[Verdict] = Counter()

    def save(self, numbers: Sequence[int]) -> list[Verdict]:
        return self._timed(self.store.save, numbers, [page(NBYTES, seed=n) for n in numbers])

    def load(self, numbers: Sequence[int]) -> list[Verdict]:
        pages = [page(NBYTES, seed=-1) for _ in numbers]
        verdicts = self._timed(self.store.load, numbers, pages)
        for number, verdict, loaded in zip(numbers, verdicts, pages, strict=True):
            if verdict is Verdict.OK:
                assert loaded.tobytes() == page(NBYTES, seed=number).tobytes()
        return verdicts

    def _timed(
        self, call: Callable[..., Any], numbers: Sequence[int], pages: list[Page]
    ) -> list[Verdict]:
        began_s = time.monotonic()
        transfer = Transfer(SPACE, [hash_of(n) for n in numbers], pages)
        (verdicts,) = call([transfer]).verdicts
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        self.verdicts.update(verdicts)
        return list(verdicts)

    @contextmanager
    def traffic(self) -> Generator[None]:
        """Store and load pages while the block runs, and for two seconds after it."""
        ended, failures = threading.Event(), list[BaseException]()

        def work() -> None:
            draw = random.Random(1)
            try:
                while not ended.is_set():
                    numbers = draw.sample(range(COUNT), 8)
                    draw.choice((self.save, self.load))(numbers)
            except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
            time.sleep(TRAFFIC_S)
        finally:
            ended.set()
            thread.join()
        assert not failures, failures


@contextmanager
def engine(configured: dict[str, Any]) -> Generator[Engine]:
    with (
        open_storage("tiered", configured) as storage,
        PageStore(storage, PageStoreSettings(timeout_s=TIMEOUT_S)) as store,
    ):
        yield Engine(store)


class Accident(NamedTuple):
    strike: Callable[[Disks], None]
    mend: Callable[[Disks], None]
    least: float
    """The part of the pages that the disks still serve alone, after the accident and a start."""


def _exchange(disks: Disks) -> None:
    for place in ("d0", "d1"):
        disks.unmount(place)
    disks.mount("d0", "d1")
    disks.mount("d1", "d0")


def _fill(disks: Disks) -> None:
    with (disks.raw("d0") / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return


def _wipe(disks: Disks) -> None:
    shutil.rmtree(disks.raw("d0") / "kv")


def _unmount(disks: Disks) -> None:
    disks.unmount("d0")


def _mount(disks: Disks) -> None:
    disks.mount("d0", "d0")


def _empty(disks: Disks) -> None:
    (disks.raw("d0") / "fill").unlink()


def _allow(disks: Disks) -> None:
    """Let an empty disk be used in the place of a labelled one, as docs/tiers.md says."""
    (disks.raw("d0") / "kv" / "spaces").mkdir(parents=True, exist_ok=True)


def _nothing(_: Disks) -> None:
    pass


ACCIDENTS = {
    "unmounted": Accident(_unmount, _mount, 0.3),
    "exchanged": Accident(_exchange, _nothing, 1.0),
    "full": Accident(_fill, _empty, 1.0),
    "wiped": Accident(_wipe, _allow, 0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCIDENTS)
def test_an_accident_costs_the_hits_of_its_disk(name: str, disks: Disks, bucket: Rclone) -> None:
    accident, configured = ACCIDENTS[name], config(disks, bucket)
    everything = range(COUNT)
    with engine(configured) as first:
        for start in range(0, COUNT, 20):
            assert {Verdict.OK} == set(first.save(everything[start : start + 20]))
    with engine(configured) as running:
        with running.traffic():
            accident.strike(disks)
        during = running.longest_s
    with engine(configured) as restarted, restarted.traffic():
        whole = restarted.load(everything).count(Verdict.OK)
    bucket.stop()
    with engine(configured) as alone, alone.traffic():
        disks_only = alone.load(everything).count(Verdict.OK)
    bucket.start()
    accident.mend(disks)
    with engine(configured) as mended, mended.traffic():
        assert {Verdict.OK} == set(mended.load(everything))
    logger.info(
        "%s: %d hits of %d with the bucket, %d without; longest calls %.2f, %.2f, %.2f s",
        *(name, whole, COUNT, disks_only),
        *(during, restarted.longest_s, alone.longest_s),
    )

    assert COUNT == whole
    assert COUNT * accident.least <= disks_only <= COUNT
    assert max(during, restarted.longest_s, alone.longest_s) < TIMEOUT_S + 1
