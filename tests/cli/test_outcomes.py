"""Each verb, on each backend, in each state: what it says is what is there, and its exit code follows.

"Nothing is here" and "I could not look" are different answers with different exit codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions
from cli_stores import SPACE, CliStore
from looks import user_without_rights
from pages import hash_of, space
from redis_servers import client_of_one
from s3_kit import config_of
from servers import Rclone, RedisServer, S3Server, free_port

from hicache_storage import KeySpace
from hicache_storage.cli import main
from hicache_storage.cli.operations.copying import Copied, copy
from hicache_storage.cli.operations.rate_limit import RateLimit
from hicache_storage.cli.progress import Meter

PAGES, BROKEN = 12, 5
BACKENDS = ("file", "hf3fs", "redis", "s3")
DOCTOR = ("doctor", "--page-bytes", "4KiB", "--pages", "2")
_READS = "+get +strlen +zscan +hvals +hget +hgetall +scan +info +select +client|info"


@dataclass
class Case:
    """A store in one state."""

    backend: str
    state: str
    admin: CliStore
    """The store with all rights, which tells what is there."""
    store: CliStore
    """The store as the verbs name it."""
    directory: Path
    request: pytest.FixtureRequest
    key_space: KeySpace = SPACE
    opened: ExitStack = field(default_factory=ExitStack)
    acting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Take the rights away while a verb runs."""

    def beside(self, name: str) -> Path:
        """Return the path of another store, which every user may make."""
        place = self.directory / "beside"
        place.mkdir()
        place.chmod(0o777)
        return place / name

    def there(self) -> list[int]:
        """Return the numbers of the pages, as engines would find them."""
        return self.admin.numbers(self.key_space)


def _fill(client: Any) -> None:
    """Fill a server with keys of another program, until it refuses the next one."""
    for number in range(2000):
        try:
            client.set(f"other:{number}", b"x" * 4096)
        except redis.exceptions.OutOfMemoryError:
            return
    raise AssertionError("it is not full")


def _full(case: Case) -> None:
    if case.backend == "redis":
        options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
        server = case.opened.enter_context(RedisServer(case.directory / "small", *options))
        case.store = case.admin = CliStore("redis", {"url": server.url})
        case.key_space = case.store.fill(range(PAGES))
        with client_of_one(server) as client:
            _fill(client)
        return
    bounded = replace(case.store, config={**case.store.config, "capacity_nbytes": "1GiB"})
    with bounded.open() as storage:
        held = storage.stats().nbytes
    assert held
    case.store = replace(case.store, config={**case.store.config, "capacity_nbytes": held + 100})


def _foreign(case: Case) -> None:
    if case.backend == "redis":
        server: RedisServer = case.request.getfixturevalue("redis_server")
        case.store = CliStore("redis", {"url": server.url, "prefix": "foreign:"})
        with client_of_one(server) as client:
            client.set("foreign:spaces", "of another program")
        return
    if case.backend == "s3":
        case.store = replace(case.store, config={**case.store.config, "secret_access_key": "wrong"})
        return
    root = case.directory / "novels"
    root.mkdir()
    (root / "war-and-peace.txt").write_text("Well, Prince")
    case.store = CliStore(case.backend, {"path": str(root)})


def _damaged(case: Case) -> None:
    case.store.break_page(BROKEN, case.key_space)


def _read_only(case: Case) -> None:
    config = case.store.config
    if case.backend == "redis":
        server: RedisServer = case.request.getfixturevalue("redis_server")
        rights = f"reset on >look ~{config['prefix']}* {_READS}"
        with client_of_one(server) as client:
            client.execute_command("ACL", "SETUSER", "looker", *rights.split())
        case.store = replace(
            case.store, config={**config, "username": "looker", "password": "look"}
        )
    elif case.backend == "s3":
        writable: Rclone = case.request.getfixturevalue("s3_server")
        guarded = case.opened.enter_context(Rclone(writable.directory, "--read-only"))
        case.store = CliStore("s3", config_of(guarded, prefix=config["prefix"]))
    else:
        for argv in ([*DOCTOR], ["verify"], ["ls"]):  # that user may not read Python's files
            main([*argv, *case.store.flags])
        case.acting = partial(user_without_rights, Path(config["path"]))


def _unreachable(case: Case) -> None:
    if case.backend == "redis":
        case.store = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}", "timeout_s": 1})
    elif case.backend == "s3":
        down = S3Server(case.directory / "down", free_port())
        case.store = CliStore("s3", config_of(down, timeout_s=1))
    else:
        case.store = CliStore(case.backend, {"path": str(case.directory / "not-mounted/kv")})


def _sound(case: Case) -> None:
    """Leave the store as it is."""


STATES: dict[str, Callable[[Case], None]] = {
    "sound": _sound,
    "full": _full,
    "foreign": _foreign,
    "damaged": _damaged,
    "read_only": _read_only,
    "unreachable": _unreachable,
}


@pytest.fixture(params=[f"{backend}-{state}" for backend in BACKENDS for state in STATES])
def case(
    request: pytest.FixtureRequest, store_of: Callable[[str], CliStore], directory: Path
) -> Iterator[Case]:
    """Yield a store with pages, in each state. Nothing has been changed in it otherwise."""
    backend, state = request.param.split("-")
    if (backend, state) == ("s3", "full"):
        pytest.skip("a bucket has no limit")
    store = store_of(backend)
    if backend in ("file", "hf3fs"):
        store = CliStore(backend, {"path": str(directory / "kv")})
    found = Case(backend, state, store, store, directory, request)
    found.key_space = store.fill(range(PAGES))
    with found.opened:
        STATES[state](found)
        yield found


def _run(capsys: pytest.CaptureFixture[str], case: Case, *argv: str) -> tuple[int, Any, str]:
    capsys.readouterr()
    with case.acting():
        code = main([*argv, "--json", *case.store.flags])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def test_verbs_that_look_say_what_is_there(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    looked = case.state not in ("foreign", "unreachable")
    empty = CliStore("file", {"path": str(case.beside("empty"))})
    empty.open().close()
    space_id = case.key_space.id[:8]
    verbs = {
        "ls": ["ls"],
        "stats": ["stats"],
        "inspect": ["inspect", space_id, hash_of(BROKEN)],
        "verify": ["verify"],
        "diff": ["diff", *empty.target_flags],
        "dry": ["copy", "--dry-run", *empty.target_flags],
        "rm": ["rm", space_id, hash_of(3)],
        "gc": ["gc", "--pool", "kv"],
    }
    found = {name: _run(capsys, case, *argv) for name, argv in verbs.items()}

    if not looked:
        assert dict.fromkeys(verbs, 2) == {name: code for name, (code, _, _) in found.items()}
        assert all(not said and error.count("\n") == 1 for _, said, error in found.values()), found
        return
    assert [*range(PAGES)] == case.there()
    damaged = int(case.state == "damaged")
    codes = dict.fromkeys(verbs, 0) | {"diff": 1, "rm": 1, "gc": 1}
    codes |= {"verify": damaged, "inspect": damaged}
    assert codes == {name: code for name, (code, _, _) in found.items()}, found
    said = {name: document for name, (_, document, _) in found.items()}
    assert said["ls"]["spaces"][0]["pages"] == said["stats"]["stores"][0]["pages"] == PAGES
    assert said["verify"]["proofs"]["ok"] == PAGES - damaged
    assert len(said["verify"]["findings"]) == damaged
    assert said["dry"]["copied_pages"] == PAGES
    assert (said["rm"]["removed_pages"], said["gc"]["removed_pages"]) == (0, 0)


def test_doctor_ends_with_what_it_found_and_leaves_all_as_it_was(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, errors = _run(capsys, case, *DOCTOR)

    is_wrong_use = case.state in ("foreign", "unreachable") and code == 2
    assert is_wrong_use == bool(errors)
    problems = [one for one in said["checks"] if one["status"] == "problem"]
    bad = case.state in ("foreign", "read_only")
    if case.state == "unreachable":
        bad = case.backend in ("redis", "s3")  # a directory that is not there is made
    if (case.backend, case.state) == ("redis", "full"):
        bad = True  # it keeps pages until they are deleted, so that it refuses new ones
    assert bad == bool(problems) == (code in (1, 2)), said
    assert said["status"] == "problem" if bad else said["status"] != "problem"
    if case.state not in ("foreign", "unreachable"):
        assert [*range(PAGES)] == case.there()
        with case.admin.open() as storage:
            assert [case.key_space.id] == [one.id for one in storage.spaces()]


def test_a_copy_from_it_says_what_arrived(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    target = CliStore("file", {"path": str(case.beside("target"))})

    code, said, errors = _run(capsys, case, "copy", *target.target_flags)

    if case.state in ("foreign", "unreachable"):
        assert (2, None, 1) == (code, said, errors.count("\n"))
        return
    arrived = target.numbers(case.key_space)
    assert (len(arrived), 0) == (said["copied_pages"], said["lost_pages"])
    assert code == int(len(arrived) < PAGES) == int(case.state == "damaged")


def test_a_copy_to_it_says_what_arrived(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    source = CliStore("file", {"path": str(case.beside("source"))})
    source.fill(range(PAGES + 6))
    capsys.readouterr()

    with case.acting():
        code = main(["copy", "--json", *source.flags, *case.store.target_flags])

    printed = capsys.readouterr().out
    said = json.loads(printed) if printed else None
    if said is None or not said["is_done"]:
        assert (code, case.there()) == (2, [*range(PAGES)])
        return
    is_new = case.state in ("foreign", "unreachable")  # a copy makes the store that it names
    there = case.store.numbers(case.key_space) if is_new else case.there()
    assert len(there) == said["copied_pages"] + said["skipped_pages"] - said["lost_pages"], said
    assert (code == 0) == (len(there) == PAGES + 6), said


@pytest.mark.parametrize("verb", ["rm", "gc", "verify"])
def test_a_removal_says_what_is_gone(
    case: Case, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = {
        "rm": ["rm", case.key_space.id[:8], hash_of(3), hash_of(BROKEN)],
        "gc": ["gc", "--pool", "kv"],
        "verify": ["verify", "--delete-wrong"],
    }
    before = case.there()

    code, said, errors = _run(capsys, case, *argv[verb], "--yes")

    gone = len(before) - len(case.there())
    if case.state in ("foreign", "unreachable"):
        assert (2, 0, 1) == (code, gone, errors.count("\n"))
        return
    claimed = 0 if said is None else said["deleted" if verb == "verify" else "removed_pages"]
    assert claimed == gone
    if case.state == "read_only":
        assert (gone, code) == (0, 0 if verb == "verify" else code)
        assert verb == "verify" or code in (1, 2)
    else:
        wanted = {"rm": 2, "gc": PAGES, "verify": int(case.state == "damaged")}
        assert gone == wanted[verb]
        assert code == int(verb == "verify" and case.state == "damaged")


# --- removals and copies that end early -----------------------------------------------------------


def _interrupted(store: CliStore) -> CliStore:
    place = {"backend_name": "odd", "module_path": "odd_stores", "class_name": "Interrupted"}
    return CliStore("dynamic", {**place, **store.config})


def test_an_interrupted_gc_counts_what_is_gone(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    key_space = file_store.fill(range(40))
    flags = _interrupted(file_store).flags

    code = main(["gc", "--pool", "kv", "--yes", "--json", *flags])

    said = json.loads(capsys.readouterr().out)
    assert (130, 0, 20) == (code, said["removed_spaces"], said["removed_pages"])
    assert len(file_store.numbers(key_space)) == 20
    assert said["reasons"][key_space.id].endswith("interrupted; 20 of 40 pages are left")


def test_an_interrupted_deletion_of_wrong_pages_counts_what_is_gone(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    key_space = file_store.fill(range(4))
    for number in (1, 2):
        file_store.break_page(number, key_space)

    code = main(["verify", "--delete-wrong", "--yes", "--json", *_interrupted(file_store).flags])

    assert (130, 1) == (code, json.loads(capsys.readouterr().out)["deleted"])
    assert len(file_store.numbers(key_space)) == 3


def test_an_interrupted_rm_says_what_is_left(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    key_space = file_store.fill(range(4))
    argv = ["rm", key_space.id[:8], hash_of(0), hash_of(1), "--yes"]

    assert main([*argv, *_interrupted(file_store).flags]) == 130
    assert "1 of 2 pages are left" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["file", "redis"])
def test_a_copy_into_a_store_that_evicts_counts_what_is_there(backend: str, tmp_path: Path) -> None:
    source = CliStore("file", {"path": str(tmp_path / "source")})
    key_space = source.fill(range(400), space(page_nbytes=8192))
    with ExitStack() as opened:
        target = CliStore("file", {"path": str(tmp_path / "to"), "capacity_nbytes": "1MiB"})
        if backend == "redis":
            options = ("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
            server = opened.enter_context(RedisServer(tmp_path / "small", *options))
            target = CliStore("redis", {"url": server.url})
        copied = Copied()
        with source.open() as one, target.open() as other:
            copy(one, other, [key_space], Meter(), RateLimit(None), result=copied)
        there = len(target.numbers(key_space, limit=400))

    assert copied.lost is not None
    assert there == copied.copied - copied.lost < 400
    assert not copied.is_whole
