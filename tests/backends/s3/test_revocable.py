"""`s3` with memory that its owner revokes, before a call or while it runs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import in_time
from hicache_backends.s3 import S3Storage
from lent_pages import lent_page, revoked
from pages import hash_of, page, space
from s3_kit import config_of
from s3_script import RESET, Answer, ScriptedS3, reply, size
from servers import Rclone, TlsRclone, make_certificates, wait_until

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage

NBYTES = 4096
RIGHT = page(seed=1).tobytes()
TAKEN = b"\xff" * NBYTES
HASHES = [hash_of(number) for number in range(8)]
LARGE_NBYTES = 1 << 20
LARGE = space(page_nbytes=LARGE_NBYTES)
CHECKS: list[dict[str, Any]] = [{}, {"checksum": "crc32"}, {"sign_payload": True}]

pytestmark = pytest.mark.usefixtures("transport")


@pytest.fixture(scope="module", params=["plain", "tls"])
def certificates(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path | None:
    if request.param == "plain":
        return None
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


@pytest.fixture
def server(certificates: Path | None) -> Iterator[ScriptedS3]:
    with ScriptedS3(certificates) as scripted:
        yield scripted


@pytest.fixture(scope="module", params=[Rclone, TlsRclone])
def real_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rclone]:
    with request.param(tmp_path_factory.mktemp("server")) as server:
        yield server


class RevokedWhen(AtomicRevocable):
    """A revocable whose owner revokes it as soon as something is true."""

    def __init__(self, is_time: Callable[[], bool]) -> None:
        super().__init__()
        self._is_time = is_time

    def enter(self) -> bool:
        if self._is_time():
            self.revoke()
        return super().enter()


def opened(server: ScriptedS3, *answers: Answer, **fields: Any) -> S3Storage:
    storage = in_time(lambda: S3Storage.from_config(server.config(**fields)))
    server.script.extend(answers)
    return storage


def take(pages: list[Page], revocable: AtomicRevocable) -> None:
    """Take the memory of pages back, and use it for something else."""
    revocable.revoke()
    for one in pages:
        one.copy_from(b"\xff" * one.nbytes)


@pytest.mark.parametrize("fields", CHECKS)
def test_a_page_that_was_revoked_before_is_a_miss_beside_others(
    server: ScriptedS3, fields: dict[str, Any]
) -> None:
    pages = [lent_page(NBYTES, None, revoked()), lent_page(NBYTES)]
    with opened(server, reply(200, RIGHT), **fields) as storage:
        assert [False, True] == storage.batch_get(space(), HASHES[:2], pages)
        assert not any(storage.stats().counters.values())
    assert ["GET"] == server.methods
    assert [b"\xa5" * NBYTES, RIGHT] == [one.tobytes() for one in pages]


@pytest.mark.parametrize("fields", CHECKS)
def test_a_page_that_was_revoked_before_is_not_sent(
    server: ScriptedS3, fields: dict[str, Any]
) -> None:
    pages = [lent_page(NBYTES, 1, revoked()), lent_page(NBYTES, 1)]
    with opened(server, reply(200), **fields) as storage:
        assert [False, True] == storage.batch_set(space(), HASHES[:2], pages)
        assert not any(storage.stats().counters.values())
    assert [RIGHT] == [request.body for request in server.requests if request.body]


@pytest.mark.parametrize("fields", CHECKS[1:])
def test_a_page_that_is_revoked_after_it_was_hashed_is_not_sent(
    server: ScriptedS3, fields: dict[str, Any]
) -> None:
    at_the_second_access = RevokedWhen(lambda: next(accesses) == 1)
    accesses = itertools.count()
    with opened(server, **fields) as storage:
        lent = lent_page(NBYTES, 1, at_the_second_access)
        assert [False] == storage.batch_set(space(), HASHES[:1], [lent])
    assert not any(request.body for request in server.requests)


def test_half_a_reply_is_never_taken_for_the_next_one(server: ScriptedS3) -> None:
    revocable, results = AtomicRevocable(), list[bool]()
    lent = [lent_page(NBYTES, None, revocable) for _ in range(4)]
    whole, half = reply(200, RIGHT), Answer(reply(200, RIGHT).data[:-100], "later")
    server.rest = RIGHT[-100:]
    with opened(server, *[whole] * 4, *[half] * 4, fan_out=4, timeout_s=30.0) as storage:
        assert all(storage.batch_get(space(), HASHES[:4], [lent_page(NBYTES) for _ in range(4)]))
        server.requests.clear()
        reading = threading.Thread(
            target=lambda: results.extend(storage.batch_get(space(), HASHES[:4], lent))
        )
        reading.start()
        wait_until(lambda: len(server.requests) == 4)
        take(lent, revocable)
        server.release_rest.set()
        reading.join()
        idle = vars(storage)["_client"]._connections.get()._idle
        assert not idle
        server.script.extend([whole] * 4)
        later = [lent_page(NBYTES) for _ in range(4)]

        assert [True] * 4 == storage.batch_get(space(), HASHES[:4], later)
        assert not any(storage.stats().counters.values())
    assert [False] * 4 == results
    assert [TAKEN] * 4 == [one.tobytes() for one in lent]
    assert [RIGHT] * 4 == [one.tobytes() for one in later]


def test_a_server_that_hangs_in_a_page_does_not_reach_what_was_revoked(server: ScriptedS3) -> None:
    revocable = AtomicRevocable()
    lent = lent_page(NBYTES, None, revocable)
    with opened(server, Answer(reply(200, RIGHT).data[:-100], "hold"), timeout_s=0.5) as storage:
        reading = threading.Thread(target=_read, args=(storage, lent))
        reading.start()
        wait_until(lambda: lent.tobytes()[:100] == RIGHT[:100])
        take([lent], revocable)
        reading.join()

        assert lent.tobytes() == TAKEN


def _read(storage: HiCacheStorage, lent: Page) -> None:
    with pytest.raises(StorageTimeout):
        storage.batch_get(space(), HASHES[:1], [lent])


def test_a_set_whose_answer_was_lost_is_looked_up_if_its_page_is_gone(server: ScriptedS3) -> None:
    def lent() -> Page:
        is_sent = RevokedWhen(lambda: "PUT" in server.methods)
        return lent_page(NBYTES, 1, is_sent)

    with opened(server, RESET, size(NBYTES)) as storage:
        assert [True] == storage.batch_set(space(), HASHES[:1], [lent()])
    assert ["PUT", "HEAD"] == server.methods
    server.requests.clear()
    with (
        opened(server, reply(404), RESET, reply(404), head_first_nbytes=0) as storage,
        pytest.raises(StorageUnavailable, match="broke the connection"),
    ):
        storage.batch_set(space(), HASHES[:1], [lent()])
    assert ["HEAD", "PUT", "HEAD"] == server.methods


def test_a_set_on_a_stale_connection_is_looked_up_if_its_page_is_gone(server: ScriptedS3) -> None:
    lent = lent_page(NBYTES, 1, RevokedWhen(lambda: server.methods.count("PUT") == 2))
    with opened(server, reply(200), RESET, size(NBYTES)) as storage:
        assert [True] == storage.batch_set(space(), HASHES[:1], [page()])
        assert [True] == storage.batch_set(space(), HASHES[1:2], [lent])
    assert ["PUT", "PUT", "HEAD"] == server.methods


def test_a_page_that_is_revoked_before_its_check_is_not_deleted(server: ScriptedS3) -> None:
    lent = lent_page(NBYTES, None, RevokedWhen(lambda: bool(server.requests)))
    wrong = reply(200, RIGHT, headers={"x-amz-checksum-crc32": "AAAAAA=="})
    with opened(server, wrong, checksum="crc32") as storage:
        assert [False] == storage.batch_get(space(), HASHES[:1], [lent])
        assert not any(storage.stats().counters.values())
    assert ["GET"] == server.methods


def test_after_pages_were_revoked_at_any_moment_the_next_call_works(real_server: Rclone) -> None:
    tls = {"ca_file": str(real_server.authority)} if isinstance(real_server, TlsRclone) else {}
    sound = [page(LARGE_NBYTES, number) for number in range(8)]
    with S3Storage.from_config(config_of(real_server, **tls)) as storage:
        storage.open_space(LARGE)
        for attempt in range(16):
            revocable = AtomicRevocable()
            lent = [lent_page(LARGE_NBYTES, number, revocable) for number in range(8)]
            moving = threading.Thread(
                target=storage.batch_get if attempt % 2 else storage.batch_set,
                args=(LARGE, HASHES, lent),
            )
            moving.start()
            time.sleep(attempt / 500)
            take(lent, revocable)
            moving.join()
            assert {b"\xff" * LARGE_NBYTES} == {one.tobytes() for one in lent}
            _must_be_right_or_absent(storage, sound)
            assert [True] * 8 == storage.batch_set(LARGE, HASHES, sound)
            assert 8 == _must_be_right_or_absent(storage, sound)
            if attempt % 2:
                storage.batch_delete(LARGE, HASHES)
        counters = storage.stats().counters
    assert not {"malformed", "truncated", "wrong_size"} & {
        name for name, count in counters.items() if count
    }


def _must_be_right_or_absent(storage: HiCacheStorage, sound: list[Page]) -> int:
    targets = [Page(bytearray(LARGE_NBYTES)) for _ in HASHES]
    found = storage.batch_get(LARGE, HASHES, targets)
    for target, hit, right in zip(targets, found, sound, strict=True):
        assert not hit or target.tobytes() == right.tobytes()
    return found.count(True)
