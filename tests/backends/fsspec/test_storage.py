"""The storage of `fsspec` over filesystems that need no server."""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from clocks import ends_in, in_time
from fsspec_stores import (
    LIMIT_S,
    SECRET,
    SPACE,
    A,
    B,
    Hooks,
    ObjectStore,
    open_store,
    page_file,
    raising,
)
from hicache_backends.fsspec import FsspecSettings, FsspecStorage
from hicache_backends.fsspec.layout import TRAILER_NBYTES, file_nbytes, pack_page, unpack_page
from hicache_backends.fsspec.lookup import Lookup
from looks import look, snapshot
from pages import blank, hash_of, page, space

from hicache_storage.backend_support import registrations
from hicache_storage.backend_support.answers import unanswered_in
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
)
from hicache_storage.page import Page
from hicache_storage.registry import open_storage
from hicache_storage.storage import (
    Durability,
    PageFault,
    Retention,
    UnreadableKind,
    UnreadableSpace,
)

C = hash_of(3)


class TestClaims:
    def test_local_files_stay_and_are_shared(self, local: FsspecStorage) -> None:
        claims = local.capabilities

        assert (Retention.UNTIL_DELETED, Durability.CRASH) == (claims.retention, claims.durability)
        assert claims.shared
        assert claims.overwrites

    def test_memory_is_not_durable(self) -> None:
        with FsspecStorage.from_config({"url": "memory://kv"}) as store:
            claims = store.capabilities

        assert (Durability.PROCESS, False) == (claims.durability, claims.shared)

    def test_an_unknown_filesystem_claims_nothing(self, scripted: Hooks) -> None:
        with open_store("scripted://kv") as store:
            claims = store.capabilities

        assert (Retention.BEST_EFFORT, Durability.PROCESS) == (claims.retention, claims.durability)
        assert not claims.shared
        assert not claims.overwrites

    def test_the_config_overrides_the_claims_of_a_filesystem(self, scripted: Hooks) -> None:
        with open_store("scripted://kv", atomic="put") as store:
            assert store.capabilities.overwrites
            assert store.capabilities.retention is Retention.UNTIL_DELETED

    def test_the_parallelism_is_the_configured_one(self, tmp_path: Path) -> None:
        with open_store(f"file://{tmp_path}/kv", parallelism=3) as store:
            assert store.capabilities.parallelism == 3


class TestLooking:
    """Calls on a store that is opened read-only change nothing in it."""

    @pytest.mark.parametrize("atomic", ["auto", "none"])
    def test_nothing_is_made_removed_or_healed(self, tmp_path: Path, atomic: str) -> None:
        root, config = tmp_path / "kv", {"url": f"file://{tmp_path}/kv", "atomic": atomic}
        with open_store(**config) as store:
            store.batch_set(SPACE, [A, B, C], [page(), page(), page()])
        page_file(tmp_path, A).write_bytes(bytes(file_nbytes(SPACE)))
        page_file(tmp_path, B).write_bytes(b"cut")
        (root / "writing").mkdir(exist_ok=True)
        (root / ("0" * 32)).mkdir()
        strangers = [
            root / "notes.txt",
            root / "writing" / "novel.txt",
            root / "writing" / "0123456789abcdef-0",
            root / ("0" * 32) / "manifest.json",
        ]
        for path in strangers:
            path.write_text("mine")
            os.utime(path, (0, 0))
        before = snapshot(root)
        with open_storage("fsspec", config, read_only=True) as store:
            look(store, SPACE, [A, B, C, hash_of(9)])
            look(store, space(pool="draft"), [A])

        assert before == snapshot(root)

    def test_a_read_only_directory_is_read(self, tmp_path: Path) -> None:
        """A read-only storage does not need the `writing` directory, and does not make it."""
        with open_store(f"file://{tmp_path}/kv") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
        (tmp_path / "kv" / "writing").rmdir()
        with open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}, read_only=True) as store:
            assert list(store.spaces()) == [SPACE]
            assert store.batch_get(SPACE, [A], [found := blank()]) == [True]

        assert found.tobytes() == page(seed=1).tobytes()
        assert not (tmp_path / "kv" / "writing").exists()

    @pytest.mark.parametrize("names", [None, [], ["spaces", "writers", "notes.txt"]])
    def test_a_place_without_a_store_is_no_empty_store(
        self, tmp_path: Path, names: list[str] | None
    ) -> None:
        """The place is a missing directory, an unused mount point or the store of another backend."""
        for name in names or ():
            (tmp_path / "kv" / name).mkdir(parents=True)
        if names == []:
            (tmp_path / "kv").mkdir()
        before = snapshot(tmp_path)
        with pytest.raises(ConfigError, match=f"there is no store at file://{tmp_path}/kv"):
            open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}, read_only=True)

        assert before == snapshot(tmp_path)

    def test_a_store_that_goes_meanwhile_is_unavailable(self, tmp_path: Path) -> None:
        open_store(f"file://{tmp_path}/kv").close()
        with open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}, read_only=True) as store:
            (tmp_path / "kv").rename(tmp_path / "elsewhere")
            with pytest.raises(StorageUnavailable, match="is gone"):
                store.spaces()


class TestFaults:
    def test_a_listing_tells_of_wrong_lengths(self, local: FsspecStorage, tmp_path: Path) -> None:
        local.batch_set(SPACE, [A, B], [page(), page()])
        page_file(tmp_path, A).write_bytes(b"cut")
        nbytes = SPACE.stored_nbytes + TRAILER_NBYTES
        wrong = PageFault(A, "wrong_size", f"its file is 3 bytes long instead of {nbytes:,}")

        assert [wrong] == list(local.faults(SPACE))
        assert [wrong] == list(local.faults(SPACE, [A, B, C]))

    @pytest.mark.parametrize("atomic", ["auto", "none"])
    def test_a_page_that_does_not_fit_its_trailer_is_told_and_stays(
        self, tmp_path: Path, atomic: str
    ) -> None:
        with open_store(f"file://{tmp_path}/kv", atomic=atomic) as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            page_file(tmp_path, B).write_bytes(page_file(tmp_path, A).read_bytes())

            assert [(B, "corrupt")] == [
                (f.page_hash, f.reason) for f in store.faults(SPACE, [A, B])
            ]
            assert page_file(tmp_path, B).exists()

    def test_a_page_that_cannot_be_read_is_no_verdict(self, scripted: Hooks) -> None:
        def denied_for_a(path: str) -> None:
            if path.endswith(A):
                raise PermissionError(errno.EACCES, SECRET)

        with open_store("scripted://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            scripted.before_read = denied_for_a
            with pytest.raises(StorageUnavailable):
                list(store.faults(SPACE, [A, B]))


class TestUnreadableSpaces:
    @pytest.mark.parametrize("manifest", ["", "{}", "[1]", None])
    def test_pages_without_a_valid_manifest_are_told(
        self, local: FsspecStorage, tmp_path: Path, manifest: str | None
    ) -> None:
        local.batch_set(SPACE, [A], [page()])
        path = tmp_path / "kv" / SPACE.id / "manifest.json"
        if manifest is None:
            path.unlink()
        else:
            path.write_text(manifest)

        what = "lost" if manifest is None else "damaged"
        told = UnreadableSpace(SPACE.id, UnreadableKind.DAMAGED, f"its manifest is {what}")
        assert [told] == list(local.unreadable_spaces())
        assert [] == list(local.spaces())

    def test_a_file_and_an_empty_directory_are_no_key_space(
        self, local: FsspecStorage, tmp_path: Path
    ) -> None:
        (tmp_path / "kv" / ("0" * 32)).mkdir()
        (tmp_path / "kv" / ("1" * 32)).touch()

        assert [] == list(local.unreadable_spaces())
        assert [SPACE] == list(local.spaces())


class TestRemoveSpace:
    @pytest.mark.parametrize("atomic", ["auto", "put", "none"])
    @pytest.mark.parametrize("manifest", ["right", "damaged"])
    def test_the_pages_and_the_manifest_go(
        self, tmp_path: Path, atomic: str, manifest: str
    ) -> None:
        with open_store(f"file://{tmp_path}/kv", atomic=atomic) as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            store.batch_set(other := space(pool="draft"), [A], [page()])
            if manifest == "damaged":
                (tmp_path / "kv" / SPACE.id / "manifest.json").write_text("{}")

            assert store.remove_space(SPACE.id) == 2
            assert not (tmp_path / "kv" / SPACE.id).exists()
            assert store.batch_exists(other, [A]) == [True]
            assert store.remove_space(SPACE.id) == 0

    @pytest.mark.parametrize("space_id", ["0" * 32, "..", "writing", "", "notes"])
    def test_an_unknown_id_is_0_and_touches_nothing(
        self, local: FsspecStorage, tmp_path: Path, space_id: str
    ) -> None:
        (tmp_path / "kv" / "notes").mkdir()
        (tmp_path / "kv" / "notes" / A).touch()
        (tmp_path / A).touch()
        before = snapshot(tmp_path)

        assert local.remove_space(space_id) == 0
        assert before == snapshot(tmp_path)

    def test_files_of_others_stay_and_are_told(self, local: FsspecStorage, tmp_path: Path) -> None:
        notes = tmp_path / "kv" / SPACE.id / "notes.txt"
        notes.write_text("mine")
        with pytest.raises(StorageUnavailable, match=r"'notes\.txt'"):
            local.remove_space(SPACE.id)

        assert notes.read_text() == "mine"

    @pytest.mark.parametrize("moment", [A, "manifest.json"])
    def test_a_key_space_that_is_written_to_meanwhile_stays(
        self, scripted: Hooks, moment: str
    ) -> None:
        """A page that is set while the manifest is removed brings the manifest back."""
        with open_store("scripted://kv") as store, open_store("scripted://kv") as writer:
            store.batch_set(SPACE, [A], [page()])

            def set_b(path: str) -> None:
                if path.endswith(moment):
                    scripted.before_remove = None
                    writer.batch_set(SPACE, [B], [page(seed=2)])

            scripted.before_remove = set_b

            assert store.remove_space(SPACE.id) == 1
            assert list(store.spaces()) == [SPACE]
            assert store.batch_exists(SPACE, [A, B]) == [False, True]

    def test_a_writer_puts_the_manifest_back(
        self, scripted: Hooks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer opened the key space before another storage removed it."""
        monkeypatch.setattr(registrations, "_INTERVAL_S", 0.0)
        with open_store("scripted://kv") as store, open_store("scripted://kv") as writer:
            store.open_space(other := space(pool="draft"))
            store.remove_space(SPACE.id)
            assert SPACE not in set(store.spaces())

            writer.batch_set(SPACE, [A], [page()])

            assert {SPACE, other} == set(store.spaces())


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
        with open_store(f"file://{tmp_path}/kv", atomic=atomic) as store:
            manifest = tmp_path / "kv" / SPACE.id / "manifest.json"
            manifest.write_bytes(b"?" * manifest.stat().st_size)
            store.open_space(SPACE)

            assert [SPACE] == list(store.spaces())


class TestClear:
    """A clear removes everything, or raises and reports the number of removed pages."""

    def test_a_slow_store_is_no_partial_count(self, scripted: Hooks) -> None:
        hashes = [hash_of(number) for number in range(60)]
        with open_store("scripted://kv", timeout_s=2, atomic="put") as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            scripted.before_remove = lambda _: time.sleep(0.2)
            with pytest.raises(StorageTimeout, match=r"\d+ pages? cleared so far: clear it again"):
                store.clear(SPACE)
            scripted.before_remove = None
            left = sum(store.batch_exists(SPACE, hashes))

            assert 0 < left < len(hashes)  # what was done stays done
            assert store.clear(SPACE) == left

    def test_the_last_key_space_of_a_memory_filesystem_can_be_removed(self) -> None:
        with open_store("memory://emptied") as store:
            store.open_space(SPACE)
            store.batch_set(SPACE, [A], [page()])

            assert store.remove_space(SPACE.id) == 1
            assert store.batch_exists(SPACE, [A]) == [False]

    def test_a_page_that_cannot_be_removed_raises_after_all_others_are_removed(
        self, scripted: Hooks
    ) -> None:
        def denied_for_a(path: str) -> None:
            if path.endswith(A):
                raise PermissionError(errno.EACCES, SECRET)

        with open_store("scripted://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            scripted.before_remove = denied_for_a
            with pytest.raises(StorageUnavailable, match="1 page cleared, 1 left"):
                store.clear(SPACE)

            assert store.batch_exists(SPACE, [A, B]) == [True, False]

    def test_it_takes_as_many_steps_as_it_needs(
        self, scripted: Hooks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To remove all pages takes twice the time limit. One step takes a quarter of the limit."""
        monkeypatch.setattr("hicache_backends.fsspec.storage._CLEARED_AT_ONCE", 5)
        hashes = [hash_of(number) for number in range(40)]
        with open_store("scripted://kv", timeout_s=2) as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            scripted.before_remove = lambda _: time.sleep(0.1)

            assert store.clear(SPACE) == len(hashes)

    def test_a_listing_that_takes_too_long_is_cut_by_the_digits_of_the_hashes(
        self, buckets: ObjectStore
    ) -> None:
        """A listing takes time for each name, as if a store lists a thousand names per request."""
        hashes = [hash_of(number) for number in range(120)]
        with open_store("gs://bucket/kv", timeout_s=0.5) as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            buckets.per_name_s = 0.01

            assert set(hashes) == {info.page_hash for info in store.scan(SPACE)}
            assert store.clear(SPACE) == len(hashes)
            buckets.per_name_s = 0.0
            assert not any(store.batch_exists(SPACE, hashes))

    @pytest.mark.parametrize("call", ["scan", "clear"])
    def test_a_silent_store_is_not_asked_for_one_piece_after_another(
        self, buckets: ObjectStore, call: str
    ) -> None:
        with open_store("gs://bucket/kv", timeout_s=1.0) as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.silent = True
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                getattr(store, call)(SPACE)
            elapsed_s = time.monotonic() - began_s
            buckets.silent = False

        assert elapsed_s < 4  # all pieces together took five times timeout_s


class TestGone:
    """A missing root raises an error: its pages are not misses."""

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

    def test_a_bucket_that_is_gone_is_unavailable(self, buckets: ObjectStore) -> None:
        with open_store("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.gone = True
            with pytest.raises(StorageUnavailable, match="is gone"):
                store.batch_exists(SPACE, [A])

    def test_a_miss_is_one_where_nobody_may_ask_for_the_bucket(self, buckets: ObjectStore) -> None:
        with open_store("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page()])
            buckets.forbids_head_bucket = True

            assert store.batch_exists(SPACE, [B]) == [False]
            assert store.batch_get(SPACE, [B], [blank()]) == [False]

    def test_a_manifest_that_cannot_be_read_is_not_left_out(self, scripted: Hooks) -> None:
        def broken_for_a_manifest(path: str) -> None:
            if SPACE.id in path:
                raise OSError(errno.EIO, "input/output error")

        with open_store("scripted://kv") as store:
            store.open_space(space(pool="draft"))
            scripted.before_read = broken_for_a_manifest
            with pytest.raises(StorageUnavailable):
                list(store.spaces())


class TestDeadline:
    def test_a_client_that_hangs_while_it_connects_hangs_no_caller(self, scripted: Hooks) -> None:
        """The thread that opens a filesystem holds a lock, for which no other call waits."""
        gate = threading.Event()
        with in_time(lambda: open_store("scripted://kv", timeout_s=0.3)) as store:
            store._mounts.get().files.close_connections()
            scripted.before_opening = lambda: gate.wait(LIMIT_S)
            for _ in range(2):
                with ends_in(1.3), pytest.raises(StorageTimeout):
                    store.batch_exists(SPACE, [A])
            gate.set()


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

    def test_a_forked_child_has_an_event_loop_of_its_own(self, buckets: ObjectStore) -> None:
        with open_store("gs://bucket/kv") as store:
            store.batch_set(SPACE, [A], [page(seed=1)])
            child = os.fork()
            if child == 0:
                hits = store.batch_get(SPACE, [A], [blank()])
                store.close()
                os._exit(0 if hits == [True] else 1)

            assert os.waitpid(child, 0)[1] == 0
            assert len(buckets.files) == 2
            assert store.batch_get(SPACE, [A], [blank()]) == [True]


# The config of `fsspec`, and its errors.


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
        with pytest.raises(
            BackendNotInstalled, match=r"gs:// needs a package besides fsspec.*gcsfs"
        ):
            FsspecStorage.from_config({"url": "gs://bucket/kv"})

    def test_options_that_the_filesystem_does_not_take_are_a_config_error(
        self, scripted: Hooks
    ) -> None:
        with pytest.raises(ConfigError, match=r"storage_options: scripted://kv .*\(TypeError\)"):
            FsspecStorage.from_config({"url": "scripted://kv", "storage_options": {"tsate": 1}})

    def test_a_path_without_a_protocol_is_local(self, tmp_path: Path) -> None:
        with open_store(f"{tmp_path}/kv") as store:
            store.batch_set(SPACE, [A], [page()])

        assert page_file(tmp_path, A).is_file()

    def test_secrets_are_in_no_repr(self) -> None:
        settings = FsspecSettings.parse(
            "fsspec", {"url": f"sftp://me:{SECRET}@host/kv", "storage_options": {"key": SECRET}}
        )

        assert SECRET not in repr(settings)
        assert SECRET not in str(settings)

    def test_secrets_are_in_no_message(self, scripted: Hooks) -> None:
        scripted.before_write = raising(OSError(f"401 with {SECRET}"))
        with pytest.raises(StorageUnavailable) as caught:
            open_store(f"scripted://me:{SECRET}@host/kv?key={SECRET}")

        assert "scripted://host/kv" in str(caught.value)
        assert SECRET not in str(caught.value)


# The format of a page's file.


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


# The look-up of pages, by listing or one by one.


class TestLookup:
    def test_few_pages_are_asked_for_one_by_one(self) -> None:
        assert Lookup(0.001).budget_s("space", 50) == 0

    def test_a_listing_may_take_what_the_pages_would(self) -> None:
        assert Lookup(0.001).budget_s("space", 500) == pytest.approx(0.5)

    def test_the_faster_kind_of_lookup_is_chosen(self) -> None:
        lookup = Lookup(0.01)
        lookup.note_listing("large", 10.0, done=True)
        lookup.note_listing("small", 0.01, done=True)

        assert lookup.budget_s("large", 100) == 0
        assert lookup.budget_s("small", 100) > 0

    def test_the_latency_of_single_lookups_is_estimated(self) -> None:
        lookup = Lookup(0.01)
        for _ in range(50):
            lookup.note_pages(100, 0.01)

        assert lookup.budget_s("space", 500) == 0

    def test_the_latency_of_one_page_is_not_that_of_many(self) -> None:
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


class TestExists:
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

    def test_a_listing_and_the_pages_share_the_time(self, scripted: Hooks) -> None:
        gate = threading.Event()
        hashes = [hash_of(number) for number in range(2000)]
        with open_store("scripted://kv", timeout_s=1.0) as store:
            store.batch_exists(SPACE, hashes)  # from here on a listing is worth a try
            store._lookup._page_s = 0.01
            scripted.before_look = lambda _: gate.wait(LIMIT_S)
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                store.batch_exists(SPACE, hashes)
            elapsed_s = time.monotonic() - began_s
            gate.set()

        assert elapsed_s < 1.9


def test_key_spaces_that_were_never_listed_are_not_remembered() -> None:
    lookup = Lookup(0.001)
    for number in range(10):
        lookup.budget_s(f"space-{number}", 20)

    assert {} == lookup._listing_s


# Verdicts and errors of a call when a filesystem fails.


class TestFailures:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_page_without_capacity_is_refused_and_no_other(
        self, scripted: Hooks, code: int
    ) -> None:
        def full_for_a(path: str) -> None:
            if path.endswith(A):
                raise OSError(code, "no room")

        with open_store("scripted://kv") as store:
            scripted.before_write = full_for_a

            assert [False, True] == store.batch_set(SPACE, [A, B], [page(), page()])
            assert {"refused_no_space": 1} == store.stats().counters

    def test_a_set_of_unknown_fate_raises(self, scripted: Hooks) -> None:
        def lost_for_a(path: str) -> None:
            if path.endswith(A):
                raise ConnectionResetError

        with open_store("scripted://kv") as store:
            scripted.before_write = lost_for_a
            with pytest.raises(StorageUnavailable, match="ConnectionResetError"):
                store.batch_set(SPACE, [A, B], [page(), page()])

    def test_a_page_that_cannot_be_read_is_a_counted_miss(self, scripted: Hooks) -> None:
        def broken_for_a(path: str) -> None:
            if path.endswith(A):
                raise OSError(errno.EIO, "input/output error")

        with open_store("scripted://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            scripted.before_read = broken_for_a

            hits = store.batch_get(SPACE, [A, B], [blank(), blank()])
            assert ([False, True], frozenset({0})) == (hits, unanswered_in(hits))
            assert {"io_errors": 1} == store.stats().counters
            scripted.before_look = broken_for_a
            assert {0} == unanswered_in(store.batch_exists(SPACE, [A, B]))

    def test_a_store_that_answers_nothing_is_unavailable(self, scripted: Hooks) -> None:
        with open_store("scripted://kv") as store:
            scripted.before_read = raising(PermissionError(errno.EACCES, "denied"))
            with pytest.raises(StorageUnavailable, match=r"PermissionError \(Permission denied\)"):
                store.batch_get(SPACE, [A, B], [blank(), blank()])

    @pytest.mark.parametrize(
        "error", [TimeoutError(), type("ReadTimeoutError", (Exception,), {})()]
    )
    def test_a_librarys_timeout_is_ours(self, scripted: Hooks, error: Exception) -> None:
        with open_store("scripted://kv") as store:
            scripted.before_read = raising(error)
            with pytest.raises(StorageTimeout):
                store.batch_get(SPACE, [A], [blank()])

    def test_a_call_that_hangs_is_given_up_in_time(self, scripted: Hooks) -> None:
        gate = threading.Event()
        with open_store("scripted://kv", timeout_s=1) as store:
            scripted.before_read = lambda _: gate.wait(LIMIT_S)
            target = blank()
            with pytest.raises(StorageTimeout, match="within 1 s"):
                store.batch_get(SPACE, [A], [target])
            gate.set()

        assert blank().tobytes() == target.tobytes()

    def test_it_works_again_afterwards(self, scripted: Hooks) -> None:
        with open_store("scripted://kv") as store:
            scripted.before_write = raising(ConnectionResetError())
            with pytest.raises(StorageUnavailable):
                store.batch_set(SPACE, [A], [page()])
            scripted.before_write = None

            assert store.batch_set(SPACE, [A], [page()]) == [True]


class TestSecrets:
    @pytest.mark.parametrize("call", ["open", "exists", "get", "set", "delete", "clear", "spaces"])
    def test_no_traceback_holds_a_message_of_a_library(self, scripted: Hooks, call: str) -> None:
        failing = raising(OSError(f"GET https://store/?token={SECRET} failed"))
        store = open_store("scripted://kv", atomic="put")
        store.batch_set(SPACE, [A], [page()])
        for moment in ("before_write", "before_read", "before_remove", "before_look"):
            setattr(scripted, moment, failing)
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
