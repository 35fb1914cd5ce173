"""Credentials are found, refreshed and replaced while calls run, and errors are translated."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.credentials import Credentials, RefreshableCredentials
from botocore.exceptions import ClientError
from clocks import ends_in
from hicache_backends.s3 import S3Storage
from hicache_backends.s3.credentials import CredentialCache
from pages import blank, hash_of, space
from s3_script import ScriptedS3, error
from servers import wait_until

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable

LIMIT_S = 30.0
SECRET = "correct-horse-battery"  # noqa: S105  # a secret to look for
REFUSAL = ClientError(
    {"Error": {"Code": "AccessDenied", "Message": SECRET}}, "AssumeRoleWithWebIdentity"
)


def after(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def granted(left_s: float = 3600, key: str = "AKIDNEW") -> dict[str, str]:
    expiry = after(left_s).isoformat()
    return {"access_key": key, "secret_key": "s", "token": "t", "expiry_time": expiry}


def refreshable(left_s: float, renew: Callable[[], dict[str, str]]) -> Any:
    """Return credentials that expire after `left_s`, and that `renew` replaces."""
    kind: Any = RefreshableCredentials
    return kind.create_from_metadata(granted(left_s, "AKIDOLD"), renew, "tests")


def with_keys(credentials: Any, left_s: float) -> CredentialCache:
    """Return a cache with the old keys, which now expire after `left_s`."""
    cache = CredentialCache(lambda: credentials)
    cache.refresh(Deadline(LIMIT_S))
    credentials._expiry_time = after(left_s)
    return cache


def raising(failure: Exception) -> Callable[[], dict[str, str]]:
    def renew() -> dict[str, str]:
        raise failure

    return renew


FAILURES = [
    pytest.param(raising(REFUSAL), id="STS refuses"),
    pytest.param(raising(ValueError(SECRET)), id="a program prints rubbish"),
    pytest.param(raising(KeyError(SECRET)), id="a field is missing"),
    pytest.param(raising(OSError(SECRET)), id="nobody is there"),
    pytest.param(lambda: granted(-60), id="the new keys have expired"),
]


@pytest.mark.parametrize("renew", FAILURES)
def test_a_renewal_that_fails_costs_nothing_while_the_keys_are_good(
    renew: Callable[[], dict[str, str]],
) -> None:
    cache = with_keys(refreshable(3600, renew), 300)

    cache.refresh(Deadline(LIMIT_S))

    assert cache.keys is not None
    assert cache.keys.access_key == "AKIDOLD"


@pytest.mark.parametrize("renew", FAILURES)
def test_a_renewal_that_fails_is_unavailable_once_the_keys_have_expired(
    renew: Callable[[], dict[str, str]],
) -> None:
    cache = with_keys(refreshable(3600, renew), -5)

    with pytest.raises(StorageUnavailable, match="credentials were not renewed") as caught:
        cache.refresh(Deadline(LIMIT_S))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_renewal_that_failed_is_tried_again_by_the_next_call() -> None:
    failures = [REFUSAL]
    cache = with_keys(
        refreshable(3600, lambda: raising(failures.pop())() if failures else granted()), -5
    )
    with pytest.raises(StorageUnavailable):
        cache.refresh(Deadline(LIMIT_S))

    cache.refresh(Deadline(LIMIT_S))

    assert cache.keys is not None
    assert cache.keys.access_key == "AKIDNEW"


@pytest.mark.parametrize("left_s", [300, -5])
def test_one_renewal_is_in_flight_however_many_calls_there_are(left_s: float) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def renew() -> dict[str, str]:
        begun.append(1)
        gate.wait(LIMIT_S)
        return granted()

    cache = with_keys(refreshable(3600, renew), left_s)
    ended: list[BaseException | None] = []

    def call() -> None:
        try:
            cache.refresh(Deadline(0.2))
        except StorageTimeout as late:
            ended.append(late)
        else:
            ended.append(None)

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    running = [one for one in threading.enumerate() if one.name == "hicache-s3-credentials"]
    gate.set()

    assert len(begun) == len(running) == 1
    assert [left_s > 0] * 16 == [one is None for one in ended]
    wait_until(lambda: cache.keys is not None and cache.keys.access_key == "AKIDNEW")


def test_keys_that_the_store_refuses_are_found_anew() -> None:
    found = [Credentials("AKIDONE", "s"), Credentials("AKIDTWO", "s")]
    cache = CredentialCache(lambda: found.pop(0))
    cache.refresh(Deadline(LIMIT_S))

    cache.invalidate()
    cache.refresh(Deadline(LIMIT_S))

    wait_until(lambda: cache.keys is not None and cache.keys.access_key == "AKIDTWO")


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


def without_keys(server: ScriptedS3, **fields: Any) -> dict[str, Any]:
    config = server.config(**fields)
    del config["access_key_id"], config["secret_access_key"]
    return config


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the path of the AWS config file on a machine without any keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "config"


def test_a_file_that_was_replaced_is_read_once_the_store_refuses_the_old_keys(
    server: ScriptedS3, no_keys: Path, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    file.write_text(text.format("AKIDONE"))
    with S3Storage.from_config(without_keys(server, credentials_file=str(file))) as store:
        file.write_text(text.format("AKIDTWO"))
        server.script.append(error(403, "InvalidAccessKeyId"))
        with pytest.raises(StorageUnavailable):
            store.batch_get(space(), [hash_of(1)], [blank()])

        def asks_with_the_new_ones() -> bool:
            store.batch_get(space(), [hash_of(1)], [blank()])
            return b"Credential=AKIDTWO/" in server.requests[-1].head

        wait_until(asks_with_the_new_ones)
    assert no_keys.parent == tmp_path


def test_a_program_that_hangs_is_a_timeout_when_the_storage_is_opened(
    server: ScriptedS3, no_keys: Path, tmp_path: Path
) -> None:
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    no_keys.write_text(f"[default]\ncredential_process = cat {fifo}\n")
    message = "credentials were not renewed in time"
    try:
        with ends_in(1.5), pytest.raises(StorageTimeout, match=message):
            S3Storage.from_config(without_keys(server, timeout_s=0.5))
    finally:
        fifo.write_text("")  # the program ends


def test_output_of_a_failed_program_is_in_no_traceback(server: ScriptedS3, no_keys: Path) -> None:
    program = f"import sys; sys.exit({SECRET!r})"
    no_keys.write_text(
        f"[default]\ncredential_process = {sys.executable} -c {json.dumps(program)}\n"
    )
    with pytest.raises(StorageUnavailable, match="CredentialRetrievalError") as caught:
        S3Storage.from_config(without_keys(server))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_half_pair_of_keys_names_what_is_missing(
    server: ScriptedS3, no_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        S3Storage.from_config(without_keys(server))
    assert not no_keys.exists()


def test_a_forked_child_finds_keys_of_its_own_while_its_parent_renews(
    server: ScriptedS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent holds botocore's lock, which nobody would ever release in the child."""
    begun, gate = threading.Event(), threading.Event()

    def renew() -> dict[str, str]:
        begun.set()
        gate.wait(LIMIT_S)
        return granted()

    parents = refreshable(3600, renew)
    parent = os.getpid()

    def found(*_: object) -> Any:
        return parents if os.getpid() == parent else Credentials("AKIDCHILD", "s")

    monkeypatch.setattr("hicache_backends.s3.access._credentials", found)
    with S3Storage.from_config(without_keys(server)) as store:
        parents._expiry_time = after(300)
        assert store.batch_exists(space(), [hash_of(1)]) == [False]
        assert begun.wait(LIMIT_S)
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            try:
                os._exit(0 if store.batch_exists(space(), [hash_of(1)]) == [False] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert b"Credential=AKIDCHILD/" in server.requests[-1].head
        gate.set()
