"""`fsspec` over filesystems that need no server, and over some that fail as they are told to."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.fsspec import FsspecSettings, FsspecStorage
from hicache_backends.fsspec.executors import EventLoopExecutor, Executor, ThreadExecutor
from hicache_backends.fsspec.layout import TRAILER_NBYTES, pack_page, unpack_page
from hicache_backends.fsspec.lookup import Lookup
from pages import blank, hash_of, page, space

from hicache_storage import open_storage
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
)
from hicache_storage.page import Page
from hicache_storage.storage import Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

fsspec: Any = importlib.import_module("fsspec")  # it has no types
MemoryFileSystem: Any = fsspec.get_filesystem_class("memory")

SPACE = space()
A, B = hash_of(1), hash_of(2)
SECRET = "correct horse battery"  # noqa: S105  # a secret to look for
LIMIT_S = 30.0


class Wish:
    """What a test wants to happen before each call."""

    before_write: Callable[[str], object] | None = None
    before_read: Callable[[str], object] | None = None
    before_remove: Callable[[str], object] | None = None
    before_look: Callable[[str], object] | None = None
    """Of a listing, or for the size of a file."""
    before_opening: Callable[[], object] | None = None


def hooked(wish: Wish, name: str, moment: str) -> Callable[..., Any]:
    """A method of the memory filesystem, and what a test wants to happen before it."""
    method = getattr(MemoryFileSystem, name)

    def call(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        before = getattr(wish, moment)
        if before is not None:
            before(path)
        return method(self, path, *arguments, **options)

    return call


@pytest.fixture
def willing() -> Wish:
    """`willing://`: a filesystem of no known kind, empty, that does what a test wants."""
    wish = Wish()

    def begin(self: Any, *, taste: str = "") -> None:
        if wish.before_opening is not None:
            wish.before_opening()
        MemoryFileSystem.__init__(self, taste=taste)

    own: dict[str, Any] = {
        "protocol": "willing",
        "store": {},
        "pseudo_dirs": [""],
        "__init__": begin,
        "pipe_file": hooked(wish, "pipe_file", "before_write"),
        "cat_file": hooked(wish, "cat_file", "before_read"),
        "rm_file": hooked(wish, "rm_file", "before_remove"),
        "ls": hooked(wish, "ls", "before_look"),
        "info": hooked(wish, "info", "before_look"),
    }
    kind = type("Willing", (MemoryFileSystem,), own)
    fsspec.register_implementation("willing", kind, clobber=True)
    return wish


class Buckets:
    """A store of objects, with the calls that gcsfs and s3fs have, and what a test wants of it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.per_name_s = 0.0
        """How long a listing takes for each name in it."""
        self.gone = False
        self.silent = False
        self.keeps_the_bucket_to_itself = False

    async def ls(self, path: str, prefix: str = "", **_: Any) -> list[dict[str, Any]]:
        if self.silent:
            await asyncio.sleep(LIMIT_S)
        names = [name for name in self.files if name.startswith(f"{path}/{prefix}")]
        await asyncio.sleep(self.per_name_s * len(names))
        if not names:
            raise FileNotFoundError(path)
        return [{"name": name, "size": len(self.files[name]), "type": "file"} for name in names]

    async def find(self, path: str, *, prefix: str = "", **_: Any) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in await self.ls(path, prefix)}

    async def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self.silent:
            await asyncio.sleep(LIMIT_S)
        if self.keeps_the_bucket_to_itself and path == "bucket":
            raise PermissionError(errno.EACCES, "no HeadBucket for you")
        if self.gone or (path != "bucket" and path not in self.files):
            raise FileNotFoundError(path)
        kind = "file" if path in self.files else "directory"
        return {"name": path, "size": len(self.files.get(path, b"")), "type": kind}

    async def cat_file(self, path: str, **_: Any) -> bytes:
        await self.info(path)
        return self.files[path]

    async def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.files[path] = value

    async def rm_file(self, path: str, **_: Any) -> None:
        await self.info(path)
        del self.files[path]


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """`gs://`: an asynchronous filesystem over such a store."""
    store = Buckets()

    def passed_on(name: str) -> Callable[..., Any]:
        async def call(_: Any, *arguments: Any, **options: Any) -> Any:
            return await getattr(store, name)(*arguments, **options)

        return call

    own: dict[str, Any] = {"protocol": "gs", "async_impl": True}
    for name in ("ls", "find", "info", "cat_file", "pipe_file", "rm_file"):
        own[f"_{name}"] = passed_on(name)
    parent: Any = importlib.import_module("fsspec.asyn").AsyncFileSystem
    registry: Any = importlib.import_module("fsspec.registry")
    monkeypatch.setitem(registry._registry, "gs", type("InBuckets", (parent,), own))
    return store


def opened(url: str, **fields: Any) -> FsspecStorage:
    store = FsspecStorage.from_config({"url": url, **fields})
    store.open_space(SPACE)
    return store


@pytest.fixture
def local(tmp_path: Path) -> Iterator[FsspecStorage]:
    with opened(f"file://{tmp_path}/kv") as store:
        yield store


def raising(error: Exception) -> Callable[[str], None]:
    def raise_it(_: str) -> None:
        raise error

    return raise_it


def page_file(root: Path, page_hash: str) -> Path:
    return root / "kv" / SPACE.id / page_hash


class TestConfig:
    def test_it_is_opened_by_its_name(self, tmp_path: Path) -> None:
        with open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}) as store:
            assert isinstance(store, FsspecStorage)

    def test_a_url_is_required(self) -> None:
        with pytest.raises(ConfigError, match="url: this field is required"):
            FsspecStorage.from_config({})

    def test_a_chain_of_filesystems_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"url: must name one filesystem, without '::'"):
            FsspecStorage.from_config({"url": "simplecache::s3://bucket/kv"})

    def test_an_unknown_filesystem_is_named(self) -> None:
        with pytest.raises(ConfigError, match="url: no filesystem is known as 'nosuch'"):
            FsspecStorage.from_config({"url": "nosuch://kv"})

    def test_a_filesystem_whose_library_is_missing_says_what_to_install(self) -> None:
        with pytest.raises(BackendNotInstalled, match=r"gs:// needs more than fsspec.*gcsfs"):
            FsspecStorage.from_config({"url": "gs://bucket/kv"})

    def test_options_that_the_filesystem_does_not_take_are_a_config_error(
        self, willing: Wish
    ) -> None:
        with pytest.raises(ConfigError, match=r"storage_options: willing://kv .*\(TypeError\)"):
            FsspecStorage.from_config({"url": "willing://kv", "storage_options": {"tsate": 1}})

    def test_a_path_without_a_protocol_is_local(self, tmp_path: Path) -> None:
        with opened(f"{tmp_path}/kv") as store:
            store.batch_set(SPACE, [A], [page()])

        assert page_file(tmp_path, A).is_file()

    def test_secrets_are_in_no_repr(self) -> None:
        settings = FsspecSettings.parse(
            "fsspec",
            {"url": f"sftp://me:{SECRET}@host/kv", "storage_options": {"key": SECRET}},
        )

        assert SECRET not in repr(settings)
        assert SECRET not in str(settings)

    def test_secrets_are_in_no_message(self, willing: Wish) -> None:
        willing.before_write = raising(OSError(f"401 with {SECRET}"))
        with pytest.raises(StorageUnavailable) as caught:
            opened(f"willing://me:{SECRET}@host/kv?key={SECRET}")

        assert "willing://host/kv" in str(caught.value)
        assert SECRET not in str(caught.value)


class TestClaims:
    def test_local_files_stay_and_are_shared(self, local: FsspecStorage) -> None:
        claims = local.capabilities

        assert (Retention.UNTIL_DELETED, Durability.CRASH) == (claims.retention, claims.durability)
        assert claims.shared
        assert claims.overwrites

    def test_memory_dies_with_its_process(self) -> None:
        with FsspecStorage.from_config({"url": "memory://kv"}) as store:
            claims = store.capabilities

        assert (Durability.PROCESS, False) == (claims.durability, claims.shared)

    def test_an_unknown_filesystem_promises_nothing(self, willing: Wish) -> None:
        with opened("willing://kv") as store:
            claims = store.capabilities

        assert (Retention.BEST_EFFORT, Durability.PROCESS) == (claims.retention, claims.durability)
        assert not claims.shared
        assert not claims.overwrites

    def test_what_is_known_better_can_be_said(self, willing: Wish) -> None:
        with opened("willing://kv", atomic="put") as store:
            assert store.capabilities.overwrites
            assert store.capabilities.retention is Retention.UNTIL_DELETED

    def test_the_parallelism_is_the_configured_one(self, tmp_path: Path) -> None:
        with opened(f"file://{tmp_path}/kv", parallelism=3) as store:
            assert store.capabilities.parallelism == 3


class TestPageObject:
    def test_it_holds_the_page_and_a_trailer(self) -> None:
        data = pack_page(page(seed=1), SPACE.id, A)

        assert len(data) == SPACE.stored_nbytes + TRAILER_NBYTES
        assert bytes(unpack_page(data, SPACE.id, A) or b"") == page(seed=1).tobytes()

    def test_segments_make_no_difference(self) -> None:
        whole = page(seed=1).tobytes()
        parts = Page(bytearray(whole[:7]), bytearray(whole[7:]))

        assert pack_page(parts, SPACE.id, A) == pack_page(page(seed=1), SPACE.id, A)

    def test_another_page_is_not_taken_for_it(self) -> None:
        data = pack_page(page(), SPACE.id, A)

        assert unpack_page(data, SPACE.id, B) is None
        assert unpack_page(data, space(pool="draft").id, A) is None

    @pytest.mark.parametrize("nbytes", [0, 1, TRAILER_NBYTES, 2000])
    def test_a_part_of_it_is_no_page(self, nbytes: int) -> None:
        assert unpack_page(pack_page(page(), SPACE.id, A)[:nbytes], SPACE.id, A) is None

    @pytest.mark.parametrize("offset", [0, 2048, 4095, 4096, 4100, 4102, 4110, 4127])
    def test_a_flipped_bit_is_no_page(self, offset: int) -> None:
        data = bytearray(pack_page(page(), SPACE.id, A))
        data[offset] ^= 1

        assert unpack_page(bytes(data), SPACE.id, A) is None

    def test_half_of_one_and_half_of_another_write_are_no_page(self) -> None:
        one, other = (pack_page(page(seed=seed), SPACE.id, A) for seed in (1, 2))

        assert unpack_page(one[:2048] + other[2048:], SPACE.id, A) is None


class TestPublishing:
    def test_nothing_but_pages_and_the_manifest_is_left(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        local.batch_set(SPACE, [A, B], [page(), page()])

        found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert {f"kv/{SPACE.id}/{name}" for name in (A, B, "manifest.json")} == found

    def test_a_write_that_fails_leaves_nothing(self, local: FsspecStorage, tmp_path: Path) -> None:
        page_file(tmp_path, A).mkdir()
        (page_file(tmp_path, A) / "in the way").touch()
        with pytest.raises(StorageUnavailable):
            local.batch_set(SPACE, [A], [page()])

        assert list((tmp_path / "kv" / "writing").iterdir()) == []

    def test_files_of_writers_that_died_long_ago_go_when_it_is_opened(self, tmp_path: Path) -> None:
        opened(f"file://{tmp_path}/kv").close()
        old, young = (tmp_path / "kv" / "writing" / name for name in ("old", "young"))
        for path in (old, young):
            path.touch()
        two_days_ago_s = time.time() - 2 * 86_400
        os.utime(old, (two_days_ago_s, two_days_ago_s))
        opened(f"file://{tmp_path}/kv").close()

        assert (False, True) == (old.exists(), young.exists())

    def test_a_directory_that_has_vanished_is_made_again(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        (tmp_path / "kv" / SPACE.id / "manifest.json").unlink()
        (tmp_path / "kv" / SPACE.id).rmdir()

        assert local.batch_set(SPACE, [A], [page()]) == [True]

    def test_in_place_a_page_that_is_there_is_left_alone(self, tmp_path: Path) -> None:
        with opened(f"file://{tmp_path}/kv", atomic="none") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            store.batch_set(SPACE, [A], [page(seed=2)])
            store.batch_get(SPACE, [A], [found := blank()])

        assert page(seed=1).tobytes() == found.tobytes()

    def test_in_place_a_page_that_was_seen_to_be_wrong_goes(self, tmp_path: Path) -> None:
        with opened(f"file://{tmp_path}/kv", atomic="none") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            page_file(tmp_path, A).write_bytes(bytes(SPACE.stored_nbytes + TRAILER_NBYTES))

            assert store.batch_get(SPACE, [A], [blank()]) == [False]
            assert not page_file(tmp_path, A).exists()
            assert store.stats().counters == {"wrong_pages": 1}


class TestListing:
    def test_foreign_files_are_neither_listed_nor_cleared(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        local.batch_set(SPACE, [A], [page()])
        foreign = [tmp_path / "kv" / "notes.txt", tmp_path / "kv" / SPACE.id / "notes.txt"]
        for path in foreign:
            path.write_text("mine")

        assert [A] == [info.page_hash for info in local.scan(SPACE)]
        assert local.clear(SPACE) == 1
        assert all(path.exists() for path in foreign)

    def test_a_manifest_that_does_not_fit_its_directory_is_no_space(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        for number, text in enumerate(["", "{}", "[1]", "null", "\0"]):
            directory = tmp_path / "kv" / f"{number:032x}"
            directory.mkdir()
            (directory / "manifest.json").write_text(text)

        assert [SPACE] == list(local.spaces())

    @pytest.mark.parametrize("atomic", ["auto", "none"])
    def test_a_manifest_that_was_damaged_is_written_again(
        self, tmp_path: Path, atomic: str
    ) -> None:
        with opened(f"file://{tmp_path}/kv", atomic=atomic) as store:
            manifest = tmp_path / "kv" / SPACE.id / "manifest.json"
            manifest.write_bytes(b"?" * manifest.stat().st_size)
            store.open_space(SPACE)

            assert [SPACE] == list(store.spaces())

    def test_a_listing_and_single_questions_agree(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        hashes = [hash_of(number) for number in range(40)]
        local.batch_set(SPACE, hashes[::2], [page() for _ in hashes[::2]])
        page_file(tmp_path, hashes[2]).write_bytes(b"cut")
        one_by_one = local.batch_exists(SPACE, hashes)
        listed = local._lookup.list_pages(local._mounts.get(), SPACE, LIMIT_S, Deadline(LIMIT_S))

        assert one_by_one == [number % 2 == 0 and number != 2 for number in range(40)]
        assert listed == {h for h, there in zip(hashes, one_by_one, strict=True) if there}


class TestFailures:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_page_without_room_is_refused_and_no_other(self, willing: Wish, code: int) -> None:
        def full_for_a(path: str) -> None:
            if path.endswith(A):
                raise OSError(code, "no room")

        with opened("willing://kv") as store:
            willing.before_write = full_for_a

            assert [False, True] == store.batch_set(SPACE, [A, B], [page(), page()])
            assert {"refused_no_space": 1} == store.stats().counters

    def test_a_set_of_unknown_fate_raises(self, willing: Wish) -> None:
        def lost_for_a(path: str) -> None:
            if path.endswith(A):
                raise ConnectionResetError

        with opened("willing://kv") as store:
            willing.before_write = lost_for_a
            with pytest.raises(StorageUnavailable, match="ConnectionResetError"):
                store.batch_set(SPACE, [A, B], [page(), page()])

    def test_a_page_that_cannot_be_read_is_a_counted_miss(self, willing: Wish) -> None:
        def broken_for_a(path: str) -> None:
            if path.endswith(A):
                raise OSError(errno.EIO, "input/output error")

        with opened("willing://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            willing.before_read = broken_for_a

            assert [False, True] == store.batch_get(SPACE, [A, B], [blank(), blank()])
            assert {"io_errors": 1} == store.stats().counters

    def test_a_store_that_answers_nothing_is_unavailable(self, willing: Wish) -> None:
        with opened("willing://kv") as store:
            willing.before_read = raising(PermissionError(errno.EACCES, "denied"))
            with pytest.raises(StorageUnavailable, match=r"PermissionError \(Permission denied\)"):
                store.batch_get(SPACE, [A, B], [blank(), blank()])

    @pytest.mark.parametrize(
        "error", [TimeoutError(), type("ReadTimeoutError", (Exception,), {})()]
    )
    def test_a_librarys_timeout_is_ours(self, willing: Wish, error: Exception) -> None:
        with opened("willing://kv") as store:
            willing.before_read = raising(error)
            with pytest.raises(StorageTimeout):
                store.batch_get(SPACE, [A], [blank()])

    def test_a_call_that_hangs_is_given_up_in_time(self, willing: Wish) -> None:
        gate = threading.Event()
        with opened("willing://kv", timeout_s=0.2) as store:
            willing.before_read = lambda _: gate.wait(LIMIT_S)
            target = blank()
            with pytest.raises(StorageTimeout, match=r"within 0.2 s"):
                store.batch_get(SPACE, [A], [target])
            gate.set()

        assert blank().tobytes() == target.tobytes()

    def test_it_works_again_afterwards(self, willing: Wish) -> None:
        with opened("willing://kv") as store:
            willing.before_write = raising(ConnectionResetError())
            with pytest.raises(StorageUnavailable):
                store.batch_set(SPACE, [A], [page()])
            willing.before_write = None

            assert store.batch_set(SPACE, [A], [page()]) == [True]


class TestClear:
    """All of it, or an error that says how far it came."""

    def test_a_slow_store_is_no_partial_count(self, willing: Wish) -> None:
        hashes = [hash_of(number) for number in range(60)]
        with opened("willing://kv", timeout_s=0.5, atomic="put") as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            willing.before_remove = lambda _: time.sleep(0.05)
            with pytest.raises(StorageTimeout, match=r"\d+ pages were cleared: call it again"):
                store.clear(SPACE)
            willing.before_remove = None
            left = sum(store.batch_exists(SPACE, hashes))

            assert 0 < left < len(hashes)  # what was done stays done
            assert store.clear(SPACE) == left

    def test_a_page_that_cannot_be_removed_is_told_after_all_others_went(
        self, willing: Wish
    ) -> None:
        def denied_for_a(path: str) -> None:
            if path.endswith(A):
                raise PermissionError(errno.EACCES, SECRET)

        with opened("willing://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            willing.before_remove = denied_for_a
            with pytest.raises(StorageUnavailable, match="1 pages are left, 1 were cleared"):
                store.clear(SPACE)

            assert store.batch_exists(SPACE, [A, B]) == [True, False]

    def test_it_takes_as_many_steps_as_it_needs(
        self, willing: Wish, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To remove all takes four times as long as a call may, to remove some of them half of that."""
        monkeypatch.setattr("hicache_backends.fsspec.storage._CLEARED_AT_ONCE", 5)
        hashes = [hash_of(number) for number in range(40)]
        with opened("willing://kv", timeout_s=1.0) as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            willing.before_remove = lambda _: time.sleep(0.1)

            assert store.clear(SPACE) == len(hashes)

    def test_a_listing_that_takes_too_long_is_cut_by_the_digits_of_the_hashes(
        self, buckets: Buckets
    ) -> None:
        """A listing takes as long as it has names, as the stores do that list them by the thousand."""
        hashes = [hash_of(number) for number in range(120)]
        with opened("gs://bucket/kv", timeout_s=0.5) as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            buckets.per_name_s = 0.01

            assert set(hashes) == {info.page_hash for info in store.scan(SPACE)}
            assert store.clear(SPACE) == len(hashes)
            buckets.per_name_s = 0.0
            assert not any(store.batch_exists(SPACE, hashes))

    @pytest.mark.parametrize("call", ["scan", "clear"])
    def test_a_silent_store_is_not_asked_for_one_piece_after_another(
        self, buckets: Buckets, call: str
    ) -> None:
        with opened("gs://bucket/kv", timeout_s=1.0) as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.silent = True
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                getattr(store, call)(SPACE)
            elapsed_s = time.monotonic() - began_s
            buckets.silent = False

        assert elapsed_s < 4  # all pieces together took five times timeout_s


class TestGone:
    """A place that vanished is no answer for its pages."""

    def test_a_directory_that_was_there_and_is_gone_is_unavailable(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        local.batch_set(SPACE, [A], [page()])
        (tmp_path / "kv").rename(tmp_path / "elsewhere")
        for call in (
            lambda: local.batch_exists(SPACE, [A]),
            lambda: local.batch_get(SPACE, [A], [blank()]),
            lambda: local.scan(SPACE),
            local.spaces,
            lambda: local.clear(SPACE),
        ):
            with pytest.raises(StorageUnavailable, match="is gone"):
                call()
        (tmp_path / "elsewhere").rename(tmp_path / "kv")

        assert local.batch_exists(SPACE, [A]) == [True]

    def test_a_directory_that_nobody_has_made_yet_is_empty(self, tmp_path: Path) -> None:
        with FsspecStorage.from_config({"url": f"file://{tmp_path}/kv"}) as store:
            assert store.batch_exists(SPACE, [A]) == [False]
            assert list(store.spaces()) == []
            assert store.clear(SPACE) == 0

    def test_a_bucket_that_is_gone_is_unavailable(self, buckets: Buckets) -> None:
        with opened("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.gone = True
            with pytest.raises(StorageUnavailable, match="is gone"):
                store.batch_exists(SPACE, [A])

    def test_a_miss_is_one_where_nobody_may_ask_for_the_bucket(self, buckets: Buckets) -> None:
        with opened("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.keeps_the_bucket_to_itself = True

            assert store.batch_exists(SPACE, [B]) == [False]
            assert store.batch_get(SPACE, [B], [blank()]) == [False]

    def test_a_manifest_that_cannot_be_read_is_not_left_out(self, willing: Wish) -> None:
        def broken_for_a_manifest(path: str) -> None:
            if SPACE.id in path:
                raise OSError(errno.EIO, "input/output error")

        with opened("willing://kv") as store:
            store.open_space(space(pool="draft"))
            willing.before_read = broken_for_a_manifest
            with pytest.raises(StorageUnavailable):
                list(store.spaces())


class TestDeadline:
    def test_a_listing_and_the_pages_share_the_time(self, willing: Wish) -> None:
        gate = threading.Event()
        hashes = [hash_of(number) for number in range(2000)]
        with opened("willing://kv", timeout_s=1.0) as store:
            store.batch_exists(SPACE, hashes)  # from here on a listing is worth a try
            store._lookup._page_s = 0.01
            willing.before_look = lambda _: gate.wait(LIMIT_S)
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                store.batch_exists(SPACE, hashes)
            elapsed_s = time.monotonic() - began_s
            gate.set()

        assert elapsed_s < 1.9

    def test_a_client_that_hangs_while_it_connects_hangs_no_caller(self, willing: Wish) -> None:
        """Whoever opens a filesystem holds a lock, for which nobody waits."""
        gate = threading.Event()
        with opened("willing://kv", timeout_s=0.3) as store:
            store._mounts.get().files.close_connections()
            willing.before_opening = lambda: gate.wait(LIMIT_S)
            for _ in range(2):
                began_s = time.monotonic()
                with pytest.raises(StorageTimeout):
                    store.batch_exists(SPACE, [A])
                assert time.monotonic() - began_s < 1.3
            gate.set()


class TestSecrets:
    @pytest.mark.parametrize("call", ["open", "exists", "get", "set", "delete", "clear", "spaces"])
    def test_no_traceback_holds_what_a_library_says(self, willing: Wish, call: str) -> None:
        telling = raising(OSError(f"GET https://store/?token={SECRET} failed"))
        store = opened("willing://kv", atomic="put")
        store.batch_set(SPACE, [A], [page()])
        for moment in ("before_write", "before_read", "before_remove", "before_look"):
            setattr(willing, moment, telling)
        calls: dict[str, Callable[[], object]] = {
            "open": lambda: store.open_space(space(pool="draft")),
            "exists": lambda: store.batch_exists(SPACE, [A]),
            "get": lambda: store.batch_get(SPACE, [A], [blank()]),
            "set": lambda: store.batch_set(SPACE, [A], [page()]),
            "delete": lambda: store.batch_delete(SPACE, [A]),
            "clear": lambda: store.clear(SPACE),
            "spaces": store.spaces,
        }
        with store, pytest.raises(StorageUnavailable) as caught:
            calls[call]()

        assert SECRET not in "".join(traceback.format_exception(caught.value))


class TestProcesses:
    def test_a_forked_child_has_a_mount_of_its_own(self, local: FsspecStorage) -> None:
        local.batch_set(SPACE, [A], [page(seed=1)])
        child = os.fork()
        if child == 0:
            found = blank()
            hit = local.batch_get(SPACE, [A], [found]) == [True]
            local.close()
            os._exit(0 if hit and found.tobytes() == page(seed=1).tobytes() else 1)

        assert os.waitpid(child, 0)[1] == 0
        assert local.batch_get(SPACE, [A], [blank()]) == [True]

    def test_a_forked_child_has_an_event_loop_of_its_own(self, buckets: Buckets) -> None:
        with opened("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            child = os.fork()
            if child == 0:
                hits = store.batch_get(SPACE, [A], [blank()])
                store.close()
                os._exit(0 if hits == [True] else 1)

            assert os.waitpid(child, 0)[1] == 0
            assert len(buckets.files) == 2
            assert store.batch_get(SPACE, [A], [blank()]) == [True]

    def test_a_name_look_up_that_hangs_does_not_keep_the_interpreter(self) -> None:
        """Libraries make them on the executor of the event loop."""
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", textwrap.dedent(_HANGS)], timeout=100, check=True)

        assert time.monotonic() - began_s < 50


_HANGS = """
    import asyncio, threading, time
    from hicache_backends.fsspec.executors import EventLoopExecutor
    from hicache_storage.backend_support.deadline import Deadline

    began = threading.Event()

    def hang():
        began.set()
        time.sleep(90)

    async def look_up(_):
        await asyncio.get_running_loop().run_in_executor(None, hang)

    (answer,) = EventLoopExecutor(1).each(look_up, [None], Deadline(2))
    assert isinstance(answer.error, TimeoutError)
    assert began.is_set()
"""


@pytest.fixture(params=[EventLoopExecutor, ThreadExecutor])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made: Executor = request.param(2)
    yield made
    made.close(on_close)


async def on_close(_: None) -> None:
    """Nothing to close."""


class TestExecutors:
    def test_answers_are_in_the_order_of_the_items(self, executor: Executor) -> None:
        async def halve(number: int) -> float:
            return 10 / number

        answers = executor.each(halve, [1, 0, 5], Deadline(LIMIT_S))

        assert [10.0, None, 2.0] == [answer.value for answer in answers]
        assert isinstance(answers[1].error, ZeroDivisionError)

    def test_what_is_not_done_by_the_deadline_is_late(self) -> None:
        async def wait(duration_s: float) -> str:
            await asyncio.sleep(duration_s)
            return "done"

        executor = EventLoopExecutor(2)
        quick, slow = executor.each(wait, [0.0, LIMIT_S], Deadline(0.2))
        executor.close(on_close)

        assert quick.value == "done"
        assert isinstance(slow.error, TimeoutError)

    def test_close_ends_those_who_wait(self) -> None:
        started = threading.Event()
        raised: list[Exception] = []

        async def wait(_: None) -> None:
            started.set()
            await asyncio.sleep(LIMIT_S)

        def call(executor: Executor) -> None:
            try:
                executor.each(wait, [None], Deadline(LIMIT_S))
            except StorageClosed as error:
                raised.append(error)

        executor = EventLoopExecutor(2)
        caller = threading.Thread(target=call, args=(executor,))
        caller.start()
        assert started.wait(LIMIT_S)
        executor.close(on_close)
        caller.join(LIMIT_S)

        assert len(raised) == 1

    def test_nothing_starts_after_close(self, executor: Executor) -> None:
        async def never(_: None) -> None:
            raise AssertionError

        closed = type(executor)(1)  # type: ignore[call-arg]
        closed.close(on_close)
        with pytest.raises(StorageClosed):
            closed.each(never, [None], Deadline(LIMIT_S))


class TestLookup:
    def test_few_pages_are_asked_for_one_by_one(self) -> None:
        assert Lookup(0.001).budget_s("space", 50) == 0

    def test_a_listing_may_take_what_the_pages_would(self) -> None:
        assert Lookup(0.001).budget_s("space", 500) == pytest.approx(0.5)

    def test_the_quicker_way_is_taken(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("large", 10.0, done=True)
        lookup.note_listing("small", 0.01, done=True)

        assert lookup.budget_s("large", 100) == 0
        assert lookup.budget_s("small", 100) > 0

    def test_what_pages_take_is_learnt(self) -> None:
        lookup = Lookup(0.01)
        for _ in range(50):
            lookup.note_pages(100, 0.01)

        assert lookup.budget_s("space", 500) == 0

    def test_a_page_alone_says_nothing_of_many(self) -> None:
        lookup = Lookup(0.0001)
        lookup.note_pages(1, 60.0)

        assert lookup.budget_s("space", 100) == 0

    def test_a_listing_that_was_given_up_is_not_tried_at_once(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("space", 1.0, done=False)

        assert lookup.budget_s("space", 200) == 0

    def test_it_is_tried_again_in_the_end(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("space", 10.0, done=True)

        assert any(lookup.budget_s("space", 100) for _ in range(50))
