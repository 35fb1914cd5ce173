"""`hicache doctor`: it reports what is wrong with a store, and what to do."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore, run_json
from composed_stores import file_member
from looks import read_only_mount
from pages import hash_of, page, space
from redis_servers import SentinelServer, TlsListener, client_of_one
from s3_kit import config_of
from servers import Rclone, RedisCluster, RedisServer, S3Server, free_port
from stores import Gate, HookedStorage, failing
from verb_processes import interrupted, slow_store

from hicache_storage import KeySpace, StorageTimeout, StorageUnavailable
from hicache_storage.cli import main
from hicache_storage.cli.operations.diagnosis import (
    Check,
    Status,
    mount_of,
    opening_problem,
    probe_checks,
    worst,
)
from hicache_storage.cli.operations.probe import Measured, probe, prove
from hicache_storage.config import StorageChoice
from hicache_storage.errors import HiCacheError
from hicache_storage.storage import Capabilities, PageTimes

_SMALL = ("--page-bytes", "4KiB", "--pages", "4")


def _checked(capsys: pytest.CaptureFixture[str], store: CliStore) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the checks by topic."""
    code, found = run_json(capsys, "doctor", *_SMALL, *store.flags)
    return code, {check["topic"]: check for check in found["checks"]}


def test_a_healthy_store_has_no_problem(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = _checked(capsys, store)

    assert code == 0, checks
    assert {"data plane", "engines", "open", "write", "read", "round trip", "prefetch"} <= {*checks}
    assert "problem" not in {check["status"] for check in checks.values()}


@pytest.mark.parametrize("backend", ["file", "hf3fs", "fsspec"])
def test_no_store_is_made_among_files_of_others(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "novel.txt").touch()
    place = {"url": f"file://{tmp_path}"} if backend == "fsspec" else {"path": str(tmp_path)}

    assert main(["doctor", *CliStore(backend, place).flags]) == 2

    message = capsys.readouterr().err
    assert f"there is no store at {place.get('url', tmp_path)}" in message
    if backend != "fsspec":
        assert message.endswith("The directory holds other files, so doctor makes no store there\n")
    assert [tmp_path / "novel.txt"] == [*tmp_path.iterdir()]


def test_a_store_that_is_not_there_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CliStore("fsspec", {"url": f"file://{tmp_path}/new"})

    code, checks = _checked(capsys, store)

    assert (0, "note", "ok") == (code, checks["open"]["status"], checks["write"]["status"])


@pytest.mark.parametrize("backend", ["redis", "s3"])
def test_a_store_that_is_down_is_a_problem_without_a_secret(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    config = (
        {"url": url, "password": "open-sesame", "timeout_s": 2}
        if backend == "redis"
        else config_of(S3Server(tmp_path, free_port()), timeout_s=2)
    )
    code = main(["doctor", *CliStore(backend, config).flags])

    printed = capsys.readouterr()
    assert code == 1
    assert "problem" in printed.out
    assert "open-sesame" not in printed.out + printed.err
    assert S3Server.secret_key not in printed.out + printed.err


def test_a_wrong_config_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *CliStore("redis", {"ulr": "redis://"}).flags]) == 2
    assert "did you mean 'url'?" in capsys.readouterr().err


def test_pages_that_no_machine_holds_are_wrong_use(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--page-bytes", "1EB", *file_store.flags]) == 2
    assert "does not have the memory: choose smaller or fewer pages\n" in capsys.readouterr().err


def test_a_redis_without_a_limit_is_noted(
    store_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = _checked(capsys, store_of("redis"))

    assert code == 0
    assert "set maxmemory" in checks["eviction"]["advice"]
    assert checks["server"]["fact"].endswith("master")
    assert checks["persistence"]["fact"] == "append-only file off"


def test_a_redis_that_refuses_when_full_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path, "--maxmemory", "100mb") as server:
        _, checks = _checked(capsys, CliStore("redis", {"url": server.url}))

    assert "volatile-ttl" in checks["eviction"]["advice"]


def test_a_redis_without_room_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path, "--maxmemory", "1") as server:
        code, checks = _checked(capsys, CliStore("redis", {"url": server.url}))

    assert code == 1
    assert "problem" == checks["eviction"]["status"]
    assert checks["write"]["fact"].startswith("not tried")


def test_time_outs_that_cannot_be_met_are_a_problem(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {"prefetch_timeout_base": 0, "prefetch_timeout_per_ki_token": 0}
    store = replace(file_store, config={**file_store.config, **limits})

    code, checks = _checked(capsys, store)

    assert (1, "problem") == (code, checks["prefetch"]["status"])
    assert "131,072 tokens need" in checks["prefetch"]["fact"]


def test_a_capacity_beyond_the_file_system_is_a_problem(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store = replace(file_store, config={**file_store.config, "capacity_nbytes": "4EB"})

    code, checks = _checked(capsys, store)

    assert code == 1
    assert "lower capacity_nbytes" in checks["free space"]["advice"]


def test_the_table_fits_80_columns(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", *_SMALL, *store.flags])

    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_page_that_comes_back_wrong_is_a_failure() -> None:
    storage = HookedStorage()

    def flip(answer: Any) -> Any:
        found = answer()
        for pages in storage.inner._spaces.values():
            for data in pages.values():
                data[-1] ^= 1
        return found

    storage.hooks["batch_set"] = flip

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16)

    assert [("read", "2 of 2 pages failed: corrupt")] == measured.failures


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("of 8 pages: 2 corrupt", "`hicache verify --delete-wrong`"),
        ("of 8 pages: 1 wrong_size, 1 unreadable", "`hicache verify --delete-wrong`"),
        ("of 8 pages: 1 not_authentic", "`hicache verify --delete-wrong`"),
        ("of 8 pages: 3 unknown_key", "add the keys"),
        ("of 8 pages: 1 unreadable", "let this user read"),
    ],
)
def test_the_advice_fits_the_pages_that_are_there(reason: str, advice: str) -> None:
    measured = Measured(8, 4096, 16, failures=[("read", reason)])

    (check,) = probe_checks(measured, StorageChoice(backend="file"))

    assert advice in check.advice


def test_the_words_of_the_store_are_part_of_a_failure() -> None:
    storage = HookedStorage()
    storage.hooks["batch_set"] = failing(StorageUnavailable("s3: this user may not write"))

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16)

    ((step, reason),) = measured.failures
    assert step == "write"
    assert "this user may not write" in reason


@pytest.mark.parametrize(
    ("step", "call", "reason"),
    [
        ("write", "batch_set", "2 of 2 pages failed: timeout"),
        ("look-up", "batch_exists", "there was no answer: timeout"),
        ("read", "batch_get", "2 of 2 pages failed: timeout"),
    ],
)
def test_a_store_that_hangs_is_asked_once(step: str, call: str, reason: str) -> None:
    storage = HookedStorage()
    gate = storage.hooks[call] = Gate()

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16, timeout_s=1.0)
    asked = storage.calls[call]
    gate.open()

    assert (step, reason) == measured.failures[0]
    assert asked == (2 if step == "look-up" else 1)  # the probe looks whether a page is left


def test_pages_that_stay_are_a_failure() -> None:
    storage = HookedStorage()
    storage.hooks["batch_delete"] = lambda _: [False] * 2

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16)

    assert [("delete", "2 of 2 pages may be left")] == measured.failures


def test_a_store_that_goes_down_meanwhile_is_no_question_of_rights() -> None:
    storage = HookedStorage()
    gone = failing(StorageUnavailable("redis: cannot connect to cache:6379: Connection refused"))
    for call in ("batch_set", "batch_exists", "batch_delete"):
        storage.hooks[call] = gone

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16)

    write, delete, *_ = probe_checks(measured, StorageChoice(backend="redis"))
    assert write.advice.startswith("start the store")
    assert "gc --model hicache-doctor --yes" in delete.advice


def test_the_innermost_mount_is_named(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "40 22 0:40 / /mnt/kv rw shared:1 - nfs4 filer:/kv rw\n"
        "41 22 0:41 / /mnt/kv2 rw - xfs /dev/sdb rw\n"
    )

    assert ("nfs4", "/mnt/kv") == mount_of(tmp_path.__class__("/mnt/kv/pages"), mounts)
    assert ("ext4", "/") == mount_of(tmp_path.__class__("/srv"), mounts)


def test_a_problem_outweighs_notes() -> None:
    checks = [
        Check("a", Status.NOTE, ""),
        Check("b", Status.PROBLEM, ""),
        Check("c", Status.OK, ""),
    ]

    assert worst(checks) is Status.PROBLEM


def test_ctrl_c_ends_it_and_leaves_nothing(file_store: CliStore, tmp_path: Path) -> None:
    slow = slow_store(file_store, tmp_path)

    code, _, errors = interrupted(tmp_path, "doctor", *_SMALL, *slow.flags)

    assert code == 130
    assert errors.endswith("hicache: interrupted\n")
    with file_store.open() as storage:
        assert [] == [*storage.spaces()]


def test_a_store_at_its_capacity_is_proved_and_not_written_to(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(20))
    used = 20 * (target.stored_nbytes + 64)
    store = replace(file_store, config={**file_store.config, "capacity_nbytes": used})

    code, checks = _checked(capsys, store)

    assert (0, "note") == (code, checks["write"]["status"]), checks
    assert checks["write"]["fact"].startswith("not tried: the store is full")
    assert checks["read"]["fact"].startswith("4 pages of")


def test_a_trial_is_as_large_as_the_free_space_allows(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file_store.fill(range(20))
    used = 20 * (target.stored_nbytes + 64)
    limits = {"capacity_nbytes": used + 2 * target.stored_nbytes}

    _, checks = _checked(capsys, replace(file_store, config={**file_store.config, **limits}))

    assert checks["write"]["fact"].startswith(
        "1 page of 4 KiB, as much as fits without an eviction"
    )


@pytest.mark.parametrize("number", ["1st run", "2nd run"])
@pytest.mark.parametrize("backend", ["file", "hf3fs"])
@pytest.mark.parametrize("pages", [4, 4.2, 5])
def test_doctor_does_not_take_the_eviction_of_its_own_pages_for_a_fault(
    pages: float, backend: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capacity = int(pages * 65536)
    store = CliStore(backend, {"path": str(tmp_path / "kv"), "capacity_nbytes": capacity})
    if number == "2nd run":
        store.open().close()

    code, found = run_json(capsys, "doctor", "--page-bytes", "64KiB", "--pages", "4", *store.flags)

    assert (0, []) == (code, [one for one in found["checks"] if one["status"] == "problem"])


def test_a_read_only_mount_is_a_problem_whatever_the_capacity(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(20))
    with read_only_mount(Path(file_store.config["path"]), tmp_path / "mount") as mount:
        store = CliStore("file", {"path": str(mount), "capacity_nbytes": 30_000})
        code, checks = _checked(capsys, store)

    assert (1, "problem") == (code, checks["mount"]["status"])


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_a_store_beyond_its_capacity_is_a_problem_with_a_unit(
    backend: str, store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(backend)
    store.fill(range(20))

    limited = replace(store, config={**store.config, "capacity_nbytes": 20480})

    code, checks = _checked(capsys, limited)

    assert (1, "problem") == (code, checks["capacity"]["status"])
    assert "more than capacity_nbytes (20 KiB)" in checks["capacity"]["fact"]


def test_no_page_and_no_key_space_is_left_behind(
    store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill(range(2))
    _checked(capsys, store)

    _, found = run_json(capsys, "ls", *store.flags)

    assert [2] == [one["pages"] for one in found["spaces"]]


@pytest.mark.parametrize(
    "store",
    [CliStore("redis", {"ulr": "redis://"}), CliStore("no-such-store", {})],
    ids=["config", "backend"],
)
def test_wrong_use_is_a_document_too(store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "doctor", *store.flags)

    assert (2, "problem") == (code, found["status"])


def test_pages_from_the_future_are_counted(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(5))
    ahead_s = time.time() + 86_400
    for path in [*Path(file_store.config["path"]).glob("spaces/*/??/*")][:2]:
        os.utime(path, (ahead_s, ahead_s))

    code, checks = _checked(capsys, file_store)

    assert 1 == code
    assert checks["times"]["fact"].startswith("2 of 5 pages: times in the future")


def test_a_get_that_moves_nothing_is_a_failure() -> None:
    storage = HookedStorage()
    storage.hooks["batch_get"] = lambda _: [True] * 2

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16)

    assert ["read"] == [step for step, _ in measured.failures]


def test_the_time_of_a_slow_write_is_no_skew_of_clocks() -> None:
    class Timed(HookedStorage):
        def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
            del space
            return [PageTimes(written_at_s=time.time() - 0.2)] * len(hashes)

    storage = Timed()

    def slow(answer: Any) -> Any:
        time.sleep(0.4)
        return answer()

    storage.hooks["batch_set"] = slow

    measured = probe(storage, pages=1, page_nbytes=512, page_tokens=16)

    assert measured.clock_skew_s == 0


@pytest.mark.parametrize("tries", [probe, prove])
def test_a_machine_that_is_busy_during_one_read_has_no_slow_store(tries: Any) -> None:
    storage, pauses = HookedStorage(Capabilities(enumerable=True)), iter([0.3])
    storage.open_space(space())
    storage.batch_set(space(), [hash_of(n) for n in range(2)], [page()] * 2)

    def slow_once(answer: Any) -> Any:
        time.sleep(next(pauses, 0.0))
        return answer()

    storage.hooks["batch_get"] = slow_once
    trial = {"pages": 2} if tries is prove else {"pages": 2, "page_nbytes": 512, "page_tokens": 16}

    measured = tries(storage, **trial)

    assert measured.read_nbytes_s > 2 * measured.page_nbytes / 0.3


def test_a_page_that_comes_after_its_time_out_is_deleted() -> None:
    storage = HookedStorage()
    gate = storage.hooks["batch_set"] = Gate()
    deletions = iter((gate.open, lambda: None))

    def delete(answer: Any) -> Any:
        done = answer()
        next(deletions, lambda: None)()  # the write goes on after the first deletion
        return done

    storage.hooks["batch_delete"] = delete

    measured = probe(storage, pages=2, page_nbytes=512, page_tokens=16, timeout_s=2.0)

    assert measured.is_late
    assert [] == [info for one in storage.inner.spaces() for info in storage.inner.scan(one)]


def _unavailable(message: str, code: int | None = None) -> HiCacheError:
    error = StorageUnavailable(message)
    error.__cause__ = None if code is None else OSError(code, os.strerror(code))
    return error


def _of_a_tier(error: HiCacheError) -> HiCacheError:
    """Return the error as a composition raises it, with the name of the tier."""
    named = StorageUnavailable(f"tiered: tiers.nvme: {error}")
    named.__cause__ = error
    return named


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            _of_a_tier(_unavailable("file: Permission denied", errno.EACCES)),
            "let this user read and write there",
        ),
        (_unavailable("file: Read-only file system", errno.EROFS), "mount it for writing"),
        (
            _unavailable("file: Permission denied", errno.EACCES),
            "let this user read and write there",
        ),
        (StorageUnavailable("hf3fs: restarted", advice="wait 65 s"), "wait 65 s"),
        (_of_a_tier(StorageUnavailable("hf3fs: restarted", advice="wait 65 s")), "wait 65 s"),
        (
            _unavailable("file: /kv/spaces/0a/b1 cannot be listed: Permission denied"),
            "let this user read and write there",
        ),
        (StorageTimeout("redis: no answer"), "raise timeout_s"),
        (_unavailable("redis: refused"), "start the store"),
        (_unavailable("hf3fs: /kv/index cannot be used: database or disk is full"), "make room"),
    ],
)
def test_the_advice_fits_the_reason(error: HiCacheError, advice: str) -> None:
    assert advice in opening_problem(error).advice


def test_each_kind_of_key_space_that_cannot_be_read_has_its_own_advice(
    file_store: CliStore, unread: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, newer, unknown = (file_store.fill(range(2), space(model=name)) for name in "abc")
    manifests = Path(file_store.config["path"], "spaces").glob
    for path in manifests(f"{damaged.id}/*.json"):
        path.write_text("{")
    for path in manifests(f"{newer.id}/*.json"):
        path.write_text(json.dumps(newer.manifest() | {"field_of_2030": 1}))
    for path in manifests(f"{unknown.id}/*.json"):
        unread(path)

    code, found = run_json(capsys, "doctor", *_SMALL, *file_store.flags)

    advice = {
        one["fact"].split(": ")[1]: one["advice"].partition(" manifests")[0]
        for one in found["checks"]
        if one["topic"] == "key spaces"
    }
    assert code == 1
    assert advice[damaged.id] == "an engine that opens them may write their"
    assert advice[newer.id].startswith("use the version of the engines that wrote them")
    assert advice[unknown.id] == "let this user read the"


@pytest.mark.parametrize("damage", ["lost", "of another program"])
def test_an_index_that_is_not_there_is_not_a_store_that_does_not_run(
    damage: str, store_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("hf3fs")
    store.fill(range(2))
    index = Path(store.config["path"]) / "index.sqlite"
    index.unlink()
    if damage != "lost":
        index.write_bytes(b"notes" * 1000)

    code, checks = _checked(capsys, store)

    assert (1, "problem", "") == (code, checks["open"]["status"], checks["open"]["advice"])


def test_a_prefix_of_another_program_is_not_a_store_that_does_not_run(
    redis_server: RedisServer, store_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("redis")
    with client_of_one(redis_server) as client:
        client.set(f"{store.config['prefix']}spaces", "of another program")

    code, checks = _checked(capsys, store)

    assert (1, "") == (code, checks["open"]["advice"])
    assert "choose another prefix" in checks["open"]["fact"]


def _on_tls(backend: str, port: int, authority: Path | None) -> CliStore:
    """Return a store at a TLS port of this host, which trusts an authority."""
    config: dict[str, Any] = {"url": f"rediss://localhost:{port}"}
    if backend == "s3":
        url = f"https://localhost:{port}"
        config = {"bucket": "pages", "endpoint_url": url, "timeout_s": 5}
        config |= {"access_key_id": "a", "secret_access_key": "open-sesame"}
    if authority is not None:
        config["tls_ca_file" if backend == "redis" else "ca_file"] = str(authority)
    return CliStore(backend, config)


CERTIFICATES = {
    "of an unknown authority": "name the file with the authority that signed it in",
    "of another host": "name the server by a host that its certificate has",
    "that has expired": "renew the server's certificate",
}


@pytest.mark.parametrize("fault", CERTIFICATES)
@pytest.mark.parametrize("backend", ["redis", "s3"])
def test_the_advice_about_a_certificate_is_about_its_fault(
    backend: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = "other.example" if fault == "of another host" else "localhost"
    days = -1 if fault == "that has expired" else 2
    with TlsListener(tmp_path, host, days) as server:
        authority = None if fault == "of an unknown authority" else server.authority
        code, checks = _checked(capsys, _on_tls(backend, server.port, authority))

    assert code == 1, checks
    assert f"the certificate of localhost:{server.port} is refused" in checks["open"]["fact"]
    assert checks["open"]["advice"].startswith(CERTIFICATES[fault])


def test_a_plain_server_behind_a_tls_address_is_no_dead_store(
    s3_server: Rclone, redis_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend, port in (("s3", s3_server.port), ("redis", redis_server.port)):
        code, checks = _checked(capsys, _on_tls(backend, port, None))

        assert code == 1
        assert "start the store" not in checks["open"]["advice"]
        assert "the scheme must be" in checks["open"]["fact"]


def test_sentinels_and_their_master_are_told_apart(
    redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SentinelServer(tmp_path, redis_server.port) as sentinel:
        named = {"sentinels": [f"127.0.0.1:{sentinel.port}"], "sentinel_master": "pges"}
        wrong_name = CliStore("redis", {"url": "redis://", **named, "timeout_s": 2})
        code, checks = _checked(capsys, wrong_name)
        assert (1, "correct sentinel_master") == (code, checks["open"]["advice"].split(":")[0])

        code = main(["doctor", *CliStore("redis", {"url": sentinel.url}).flags])

    assert (2, True) == (code, "is a sentinel, which holds no pages" in capsys.readouterr().err)


def test_each_server_of_a_cluster_has_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisCluster(tmp_path) as cluster:
        store = CliStore("redis", {"url": cluster.url})
        _, found = run_json(capsys, "doctor", *_SMALL, *store.flags)

    facts = [one["fact"] for one in found["checks"] if one["topic"] == "eviction"]
    addresses = {f"127.0.0.1:{node.port}" for node in cluster.nodes}
    assert addresses == {fact.partition(": ")[0] for fact in facts}


@pytest.mark.parametrize(("share", "status"), [(0.1, "note"), (0.6, "problem")])
def test_parts_on_one_file_system_are_named(
    share: float, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Disks that are not mounted look the same."""
    system = os.statvfs(tmp_path)
    capacity = int(system.f_blocks * system.f_frsize * share)
    stripes = [file_member(name, tmp_path / name, capacity_nbytes=capacity) for name in "ab"]

    code, checks = _checked(capsys, CliStore("striped", {"stripes": stripes}))

    assert "a, b are on one file system" in checks["mounts"]["fact"]
    assert "mount it" in checks["mounts"]["advice"]
    assert checks["mounts"]["status"] == status
    assert status == "note" or code == 1


def test_a_fact_that_ends_doctor_is_printed_once(
    store_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("redis")
    wrong = replace(store, config={**store.config, "password": "wrong"})

    assert main(["doctor", *wrong.flags]) == 2
    printed = capsys.readouterr()
    assert "data plane" in printed.out
    assert (printed.out + printed.err).count("the server refuses it") == 1


def test_a_short_password_hides_no_word_of_a_message(
    redis_server: RedisServer, store_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of("redis")
    with client_of_one(redis_server) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "reader", "reset", "on", ">r", "~*", "+info", "+client"
        )
    reader = replace(store, config={**store.config, "username": "reader", "password": "r"})

    assert main(["ls", *reader.flags]) == 2
    assert "has no permissions to run the 'hvals' command" in capsys.readouterr().err
