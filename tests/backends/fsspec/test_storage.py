"""The storage of `fsspec` over filesystems that need no server."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
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
)
from hicache_backends.fsspec import FsspecStorage
from hicache_backends.fsspec.layout import TRAILER_NBYTES, file_nbytes
from looks import look, snapshot
from pages import blank, hash_of, page, space

from hicache_storage.backend_support import registrations
from hicache_storage.errors import (
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
)
from hicache_storage.registry import open_storage
from hicache_storage.storage import Durability, PageFault, Retention, UnreadableSpace

if TYPE_CHECKING:
    from pathlib import Path

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
    """A store that is opened read-only stays as it is, whatever is called."""

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
        """The `writing` directory is neither needed nor made."""
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
        """A directory that is missing, an unused mount point, and the store of another backend."""
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
        wrong = PageFault(A, "wrong_size", f"its file has 3 bytes, not {nbytes}")

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

        told = UnreadableSpace(SPACE.id, "its manifest is missing or damaged")
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
        """A page that arrives while the manifest is removed brings it back."""
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
        """The key space was open in another process, and was removed a while ago."""
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
        with open_store("scripted://kv", timeout_s=0.5, atomic="put") as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            scripted.before_remove = lambda _: time.sleep(0.05)
            with pytest.raises(StorageTimeout, match=r"\d+ pages were cleared: call it again"):
                store.clear(SPACE)
            scripted.before_remove = None
            left = sum(store.batch_exists(SPACE, hashes))

            assert 0 < left < len(hashes)  # what was done stays done
            assert store.clear(SPACE) == left

    def test_a_page_that_cannot_be_removed_raises_after_all_others_are_removed(
        self, scripted: Hooks
    ) -> None:
        def denied_for_a(path: str) -> None:
            if path.endswith(A):
                raise PermissionError(errno.EACCES, SECRET)

        with open_store("scripted://kv") as store:
            store.batch_set(SPACE, [A, B], [page(), page()])
            scripted.before_remove = denied_for_a
            with pytest.raises(StorageUnavailable, match="1 pages are left, 1 were cleared"):
                store.clear(SPACE)

            assert store.batch_exists(SPACE, [A, B]) == [True, False]

    def test_it_takes_as_many_steps_as_it_needs(
        self, scripted: Hooks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Removing all pages takes four times the deadline of a call, and one step half of it."""
        monkeypatch.setattr("hicache_backends.fsspec.storage._CLEARED_AT_ONCE", 5)
        hashes = [hash_of(number) for number in range(40)]
        with open_store("scripted://kv", timeout_s=1.0) as store:
            store.batch_set(SPACE, hashes, [page() for _ in hashes])
            scripted.before_remove = lambda _: time.sleep(0.1)

            assert store.clear(SPACE) == len(hashes)

    def test_a_listing_that_takes_too_long_is_cut_by_the_digits_of_the_hashes(
        self, buckets: ObjectStore
    ) -> None:
        """A listing takes time for each name, as in stores that list a thousand names a request."""
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
    """A missing root is an error, not a miss of its pages."""

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
        """The thread that opens a filesystem holds a lock. No other call waits for it."""
        gate = threading.Event()
        with open_store("scripted://kv", timeout_s=0.3) as store:
            store._mounts.get().files.close_connections()
            scripted.before_opening = lambda: gate.wait(LIMIT_S)
            for _ in range(2):
                began_s = time.monotonic()
                with pytest.raises(StorageTimeout):
                    store.batch_exists(SPACE, [A])
                assert time.monotonic() - began_s < 1.3
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
