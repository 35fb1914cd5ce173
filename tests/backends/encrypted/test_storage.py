from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.encrypted import EncryptedStorage
from hicache_backends.encrypted.layout import HEADER_NBYTES
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from looks import look, snapshot
from pages import blank, hash_of, page, space
from processes import in_a_fork
from sealed_stores import (
    KEYS,
    key_files,
    over_files,
    page_file,
    sealed_over,
    settings,
    stored_under,
)

from hicache_storage.errors import (
    ConfigError,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.page import Page
from hicache_storage.registry import open_storage
from hicache_storage.storage import (
    Durability,
    PageFault,
    PageInfo,
    PageTimes,
    UnreadableKind,
    UnreadableSpace,
)
from hicache_storage.testing import Fault, FaultyStorage, Odds, WrapperStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import HiCacheStorage

SPACE = space(tenant="a-bank")
A, B, C = hash_of(1), hash_of(2), hash_of(3)


@pytest.fixture
def inner() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def storage(inner: MemoryStorage) -> Iterator[EncryptedStorage]:
    with sealed_over(inner) as opened:
        yield opened


def raw(inner: HiCacheStorage, space: KeySpace, page_hash: str) -> bytes:
    """Return the bytes that the wrapped backend holds for a page."""
    inner_space, name = stored_under(space, page_hash)
    target = Page(bytearray(inner_space.stored_nbytes))
    assert [True] == inner.batch_get(inner_space, [name], [target])
    return target.tobytes()


def plant(inner: HiCacheStorage, space: KeySpace, page_hash: str, data: bytes) -> None:
    """Store bytes in the wrapped backend under the name that it has for a page."""
    inner_space, name = stored_under(space, page_hash)
    inner.batch_delete(inner_space, [name])
    assert [True] == inner.batch_set(inner_space, [name], [Page(bytearray(data))])


def got(storage: HiCacheStorage, page_hash: str = A, space: KeySpace = SPACE) -> bytes | None:
    target = blank(space.stored_nbytes)
    return target.tobytes() if storage.batch_get(space, [page_hash], [target])[0] else None


def put(storage: HiCacheStorage, page_hash: str = A, space: KeySpace = SPACE) -> bytes:
    """Set the page of `seed` 1, and return its bytes."""
    sent = page(space.stored_nbytes, seed=1)
    assert [True] == storage.batch_set(space, [page_hash], [sent])
    return sent.tobytes()


class TestPages:
    def test_any_segmentation_is_read_back_in_any_other(self, storage: EncryptedStorage) -> None:
        data = page(seed=1).tobytes()
        sent = Page(bytearray(data[:1]), bytearray(data[1:17]), bytearray(data[17:]))
        target = Page(bytearray(4000), bytearray(95), bytearray(1))

        assert [True] == storage.batch_set(SPACE, [A], [sent])
        assert [True] == storage.batch_get(SPACE, [A], [target])
        assert data == target.tobytes()

    @pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 4095])
    def test_any_size(self, storage: EncryptedStorage, nbytes: int) -> None:
        sized = space(page_nbytes=nbytes)

        assert put(storage, A, sized) == got(storage, A, sized)

    def test_a_page_of_another_size_is_refused(self, storage: EncryptedStorage) -> None:
        put(storage)

        assert [False, True] == storage.batch_set(SPACE, [B, C], [page(4095), page()])
        assert [False] == storage.batch_get(SPACE, [A], [blank(4097)])
        assert got(storage) is not None

    def test_a_page_that_was_read_has_no_digest(self, storage: EncryptedStorage) -> None:
        """The wrapped backend has computed its digest over the sealed page, not over the page."""
        put(storage)
        target = blank()
        target.digest, target.digest_skip = 1, 0
        storage.batch_get(SPACE, [A], [target])

        assert target.digest is None


class TestSecrecy:
    def test_the_backend_holds_nothing_readable(
        self, storage: EncryptedStorage, inner: MemoryStorage
    ) -> None:
        """The backend's data contains no page, no page hash and no field of the key space."""
        storage.open_space(SPACE)
        plain = put(storage)
        (held,) = inner.spaces()
        (info,) = inner.scan(held)
        seen = repr(held).encode() + info.page_hash.encode() + raw(inner, SPACE, A)

        secrets = [SPACE.model, SPACE.tenant, SPACE.dtype, SPACE.layout, SPACE.id, A, A[:16]]
        found = [secret for secret in secrets if secret.encode() in seen]
        pieces = [n for n in range(0, 4096 - 8, 8) if plain[n : n + 8] in seen]
        assert ([], []) == (found, pieces)

    def test_a_page_is_sealed_anew_each_time(
        self, storage: EncryptedStorage, inner: MemoryStorage
    ) -> None:
        put(storage)
        first = raw(inner, SPACE, A)
        put(storage)

        assert first[HEADER_NBYTES:] != raw(inner, SPACE, A)[HEADER_NBYTES:]

    def test_the_memory_of_pages_is_not_registered_with_the_backend(self) -> None:
        """A backend may offer registered memory to other machines."""

        class Registering(MemoryStorage):
            def register_buffer(self, buffer: HostBuffer) -> None:
                pytest.fail("it got the memory of pages")

        with sealed_over(Registering()) as storage:
            memory = bytearray(4096)
            storage.register_buffer(memory)
            storage.unregister_buffer(memory)

    def test_other_keys_find_nothing(self, inner: MemoryStorage) -> None:
        theirs, ours = sealed_over(inner, "b"), sealed_over(inner, "a")
        theirs.open_space(SPACE)
        put(theirs)

        assert [False] == ours.batch_exists(SPACE, [A])
        assert [] == list(ours.spaces())
        assert [] == list(ours.scan(SPACE))
        assert ours.clear(SPACE) == 0
        assert got(theirs) is not None


class TestForgery:
    def test_a_page_that_was_moved_to_another_name_is_a_miss(
        self, storage: EncryptedStorage, inner: MemoryStorage
    ) -> None:
        put(storage, A)
        plant(inner, SPACE, B, raw(inner, SPACE, A))

        assert [True] == storage.batch_exists(SPACE, [B])
        assert got(storage, B) is None
        assert got(storage, A) is not None

    @pytest.mark.parametrize("changes", [{"tenant": "b"}, {"model": "m"}, {"pool": "draft"}])
    def test_a_page_that_was_moved_to_another_key_space_is_a_miss(
        self, storage: EncryptedStorage, inner: MemoryStorage, changes: dict[str, Any]
    ) -> None:
        other = space(**{"tenant": "a-bank", **changes})
        put(storage, A)
        plant(inner, other, A, raw(inner, SPACE, A))

        assert got(storage, A, other) is None

    @pytest.mark.parametrize(
        "place", [0, 4, 6, 8, 31, 32, 47, 48, 49, 50, 127, 128, 2000, 4096 + HEADER_NBYTES - 1]
    )
    def test_a_flipped_bit_anywhere_is_a_miss_and_the_next_set_heals_it(
        self, tmp_path: Path, place: int
    ) -> None:
        """This also holds if the backend keeps the first bytes of a page that is set again."""
        with over_files(tmp_path) as storage:
            storage.open_space(SPACE)
            sent = put(storage)
            data = bytearray(raw(storage.inner, SPACE, A))
            data[place] ^= 4
            plant(storage.inner, SPACE, A, bytes(data))

            assert got(storage) is None
            assert [False] == storage.batch_exists(SPACE, [A])
            put(storage)
            assert sent == got(storage)

    def test_a_page_that_was_never_sealed_is_a_miss(
        self, storage: EncryptedStorage, inner: MemoryStorage
    ) -> None:
        plant(inner, SPACE, A, bytes(4096 + HEADER_NBYTES))

        assert got(storage) is None
        assert storage.stats().counters["not_authentic"] == 1

    def test_a_cut_file_is_a_miss(self, tmp_path: Path) -> None:
        with over_files(tmp_path) as storage:
            storage.open_space(SPACE)
            put(storage)
            path = page_file(tmp_path, SPACE, A)
            path.write_bytes(path.read_bytes()[:-1])

            assert got(storage) is None

    @pytest.mark.parametrize("opening", ["from_config", "open_read_only"])
    def test_a_damaged_copy_costs_no_good_one_of_another_tier(
        self, tmp_path: Path, opening: str
    ) -> None:
        files = [
            {"name": one, "backend": "file", "config": {"path": f"{tmp_path}/{one}"}}
            for one in "ab"
        ]
        config = {**key_files(tmp_path), "backend": "tiered", "config": {"tiers": files}}
        with EncryptedStorage.from_config(config) as storage:
            storage.open_space(SPACE)
            data = put(storage)
            put(storage, B)
        for where, one in (("a", A), ("a", B), ("b", B)):
            path = page_file(tmp_path / where, SPACE, one)
            (data_there := bytearray(path.read_bytes()))[1000] ^= 1
            path.write_bytes(data_there)
        before = snapshot(tmp_path)

        with getattr(EncryptedStorage, opening)(config) as storage:
            assert (data, None) == (got(storage, A), got(storage, B))
        if opening == "open_read_only":
            assert before == snapshot(tmp_path)
        else:
            left = {one: page_file(tmp_path / "a", SPACE, one).exists() for one in (A, B)}
            assert {A: False, B: False} == left
            assert page_file(tmp_path / "b", SPACE, A).exists()
            assert not page_file(tmp_path / "b", SPACE, B).exists()

    def test_one_wrong_read_deletes_nothing(
        self, inner: MemoryStorage, storage: EncryptedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that opens when it is read again was damaged on its way, not in the store."""
        data = put(storage)
        real, calls = inner.batch_get, list[int]()

        def get(space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
            hits = real(space, hashes, pages)
            if not calls:
                pages[0].segments[0][-1] ^= 1
            calls.append(1)
            return hits

        monkeypatch.setattr(inner, "batch_get", get)
        assert data == got(storage)
        assert inner.stats().pages in (None, 1)
        assert data == got(storage)

    def test_it_does_not_keep_the_page_that_it_is_given(self, inner: MemoryStorage) -> None:
        assert (True, False) == (
            inner.capabilities.keeps_given,
            sealed_over(inner).capabilities.keeps_given,
        )

    def test_a_part_that_hangs_while_a_page_is_read_again_delays_one_get(
        self, inner: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, go_on, calls = inner.batch_get, threading.Event(), list[int]()

        def get(space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
            calls.append(1)
            if len(calls) == 2:
                assert go_on.wait(30)
            return real(space, hashes, pages)

        with sealed_over(inner, timeout_s=0.5) as storage:
            plant(inner, SPACE, A, bytes(4096 + HEADER_NBYTES))
            monkeypatch.setattr(inner, "batch_get", get)
            assert got(storage) is None
            assert got(storage) is None
            assert 3 == len(calls), "the second get did not leave the page as it is"
            go_on.set()

    def test_a_page_that_cannot_be_deleted_stays_a_miss(self, inner: MemoryStorage) -> None:
        faulty = FaultyStorage(inner, [Odds("batch_delete", Fault.RAISE, 1.0)])
        with sealed_over(faulty) as storage:
            plant(inner, SPACE, A, bytes(4096 + HEADER_NBYTES))

            assert got(storage) is None
            assert faulty.calls["batch_delete"] == 1


class TestRotation:
    def test_new_pages_use_the_current_key(self, inner: MemoryStorage) -> None:
        put(sealed_over(inner, "ab", current_key="b"))
        length = raw(inner, SPACE, A)[48]

        assert b"b" == raw(inner, SPACE, A)[49 : 49 + length]

    def test_pages_of_several_keys_open_in_one_batch(self, inner: MemoryStorage) -> None:
        put(sealed_over(inner, "a"), A)
        put(sealed_over(inner, "ab", current_key="b"), B)
        put(sealed_over(inner, "ac", current_key="c"), C)
        targets = [blank(), blank(), blank()]

        both = sealed_over(inner, "ab")
        assert [True, True, False] == both.batch_get(SPACE, [A, B, C], targets)
        assert both.stats().counters["unknown_key"] == 1

    @pytest.mark.parametrize("over", ["memory", "file"])
    def test_a_page_of_a_key_that_is_not_listed_is_a_miss_and_stays(
        self, tmp_path: Path, over: str
    ) -> None:
        """A config that lists the key can still read the page. Without the key it counts as absent."""
        inner = (
            MemoryStorage()
            if over == "memory"
            else FileStorage.from_config({"path": str(tmp_path)})
        )
        old, new = sealed_over(inner, "a"), sealed_over(inner, "ab", current_key="b")
        new.open_space(SPACE)
        sent = put(new)

        assert got(old) is None
        assert [False] == old.batch_exists(SPACE, [A])
        assert sent == got(new)

    def test_a_page_that_was_set_again_by_others_is_found_again(self, inner: MemoryStorage) -> None:
        storage = sealed_over(inner, "a")
        put(sealed_over(inner, "ab", current_key="b"))
        assert got(storage) is None
        sent = put(sealed_over(inner, "a"))

        assert sent == got(storage)
        assert [True] == storage.batch_exists(SPACE, [A])

    def test_as_many_pages_of_other_keys_are_remembered_as_there_is_room_for(
        self, inner: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache_backends.encrypted.storage._MOST_REMEMBERED", 2)
        hashes = [hash_of(number) for number in range(5)]
        sealed_over(inner, "ab", current_key="b").batch_set(SPACE, hashes, [page()] * 5)
        storage = sealed_over(inner, "a")

        assert [False] * 5 == storage.batch_get(SPACE, hashes, [blank() for _ in hashes])
        assert storage.batch_exists(SPACE, hashes).count(False) in {1, 2}

    def test_a_page_that_cannot_be_replaced_is_refused(self, tmp_path: Path) -> None:
        """The backend would keep the bytes under the other key, which this storage can't decrypt."""
        inner = FileStorage.from_config({"path": str(tmp_path)})
        faulty = FaultyStorage(inner, [Odds("batch_delete", Fault.MISS, 1.0)])
        other, storage = sealed_over(inner, "ab", current_key="b"), sealed_over(faulty, "a")
        other.open_space(SPACE)
        put(other)

        assert got(storage) is None
        assert [False, True] == storage.batch_set(SPACE, [A, B], [page(), page()])
        assert got(other) is not None

    def test_a_page_of_a_key_that_is_gone_is_a_miss_and_the_next_set_heals_it(
        self, tmp_path: Path
    ) -> None:
        with over_files(tmp_path, "ab", current_key="b") as storage:
            storage.open_space(SPACE)
            put(storage)
        with over_files(tmp_path, "a") as storage:
            assert got(storage) is None
            assert put(storage) == got(storage)


class TestLooking:
    """Calls on a store that is opened read-only change nothing in it."""

    @pytest.mark.parametrize("atomic", ["auto", "none"])
    @pytest.mark.parametrize("keys", ["a", "b", "ac"])
    def test_nothing_changes_below(self, tmp_path: Path, keys: str, atomic: str) -> None:
        """The store has damaged pages, pages and key spaces under other keys, and unencrypted ones."""
        root = tmp_path / "kv"
        below = {"url": f"file://{root}", "atomic": atomic}
        with open_storage("fsspec", below) as inner, sealed_over(inner, "ab") as storage:
            storage.open_space(SPACE)
            storage.batch_set(SPACE, [A, B], [page(), page()])
            plant(inner, SPACE, B, bytes(4096 + HEADER_NBYTES))
            for other in (
                sealed_over(inner, "ab", current_key="b"),
                sealed_over(inner, "c"),
                inner,
            ):
                other.open_space(SPACE)
                put(other, C)
            cut = root / stored_under(SPACE, C)[0].id / stored_under(SPACE, C)[1]
            cut.write_bytes(cut.read_bytes()[:-1])
        before = snapshot(root)
        config = {"backend": "fsspec", "config": below, **key_files(tmp_path, keys)}
        with open_storage("encrypted", config, read_only=True) as storage:
            look(storage, SPACE, [A, B, C, hash_of(4)])

        assert before == snapshot(root)

    def test_the_backend_is_opened_read_only(self, tmp_path: Path) -> None:
        config = {
            "backend": "fsspec",
            "config": {"url": f"file://{tmp_path}/kv"},
            **key_files(tmp_path),
        }
        with pytest.raises(ConfigError, match="there is no store at"):
            open_storage("encrypted", config, read_only=True)

        assert not (tmp_path / "kv").exists()


class TestFaults:
    def test_damage_and_other_keys_are_told_apart(self, inner: MemoryStorage) -> None:
        both, storage = sealed_over(inner, "ab", current_key="b"), sealed_over(inner, "a")
        put(storage, A)
        put(both, B)
        plant(inner, SPACE, C, bytes(4096 + HEADER_NBYTES))

        assert [
            PageFault(B, "unknown_key", "its key 'b' is not listed"),
            PageFault(C, "not_authentic", "it is not a page that was sealed under this name"),
        ] == list(storage.faults(SPACE, [A, B, C, hash_of(4)]))
        assert [True] * 3 == storage.batch_exists(SPACE, [A, B, C])
        assert not storage.stats().counters.get("unknown_key")

    def test_those_of_the_backend_have_the_hashes_of_pages(self, tmp_path: Path) -> None:
        with (
            open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}) as inner,
            sealed_over(inner) as storage,
        ):
            storage.open_space(SPACE)
            storage.batch_set(SPACE, [A, B], [page(), page()])
            inner_space, name = stored_under(SPACE, B)
            (tmp_path / "kv" / inner_space.id / name).write_bytes(b"cut")
            (tmp_path / "kv" / inner_space.id / ("ab" * 16)).touch()

            for found in (list(storage.faults(SPACE)), list(storage.faults(SPACE, [A, B]))):
                assert (B, "wrong_size") in {(one.page_hash, one.reason) for one in found}
                assert A not in {one.page_hash for one in found}

    def test_an_object_that_is_named_like_no_page_is_none_of_a_page(self) -> None:
        class Odd(MemoryStorage):
            def faults(
                self, space: KeySpace, hashes: Sequence[str] | None = None
            ) -> Iterator[PageFault]:
                del space, hashes
                return iter([PageFault("ab" * 8, "wrong_size")])

        assert [] == list(sealed_over(Odd()).faults(SPACE))

    def test_any_number_of_pages_is_looked_at(
        self, inner: MemoryStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache_backends.encrypted.storage._LOOKED_AT_ONCE", 3)
        hashes = [hash_of(number) for number in range(10)]
        sealed_over(inner, "ab", current_key="b").batch_set(SPACE, hashes, [page()] * 10)

        assert hashes == [one.page_hash for one in sealed_over(inner).faults(SPACE, hashes)]

    def test_no_verdict_in_time_is_no_good_verdict(self, inner: MemoryStorage) -> None:
        put(sealed_over(inner))
        with pytest.raises(StorageTimeout):
            list(sealed_over(inner, timeout_s=1e-9).faults(SPACE, [A]))


class TestOtherKeys:
    """Key spaces of the wrapped backend whose names this storage can't decrypt."""

    @pytest.fixture
    def shared(self, inner: MemoryStorage) -> MemoryStorage:
        """Return a backend with a key space of key `c`, and one that is not sealed."""
        put(sealed_over(inner, "c"))
        inner.batch_set(SPACE, [A], [page()])
        return inner

    def test_a_key_space_that_no_key_opens_is_unreadable(self, shared: MemoryStorage) -> None:
        space_id, reason = stored_under(SPACE, A, "c")[0].id, "none of the keys opens its name"
        told = UnreadableSpace(space_id, UnreadableKind.OTHER_KEY, reason)

        assert [told] == list(sealed_over(shared, "ab").unreadable_spaces())

    def test_a_read_only_storage_tells_the_key_of_its_pages(self, shared: MemoryStorage) -> None:
        own = {key_id: KEYS[key_id] for key_id in "ab"}
        storage = EncryptedStorage(shared, settings("ab"), own, read_only=True)
        (told,) = storage.unreadable_spaces()

        assert told.reason == "none of the keys opens its name; it has pages of the key 'c'"

    @pytest.mark.parametrize("left", ["no page", "pages that cannot be read"])
    def test_a_key_space_whose_pages_tell_nothing(self, inner: MemoryStorage, left: str) -> None:
        class Bare(FaultyStorage):
            """A backend that keeps a key space but may list no page of it."""

            def scan(self, space: KeySpace) -> Iterator[PageInfo]:
                return iter(()) if left == "no page" else super().scan(space)

        sealed_over(inner, "c").open_space(SPACE)
        put(sealed_over(inner, "c"))
        unread = Bare(inner, [Odds("batch_get", Fault.MISS, 1.0)])
        storage = EncryptedStorage(unread, settings(), {"a": KEYS["a"]}, read_only=True)
        (told,) = storage.unreadable_spaces()

        assert told.reason == "none of the keys opens its name"

    def test_a_wrong_name_key_is_told(self, shared: MemoryStorage) -> None:
        (told,) = sealed_over(shared, "ac").unreadable_spaces()

        assert told.reason == "the key 'c' opens its name, but name_key is 'a'"

    def test_those_of_the_backend_are_passed_on(self, tmp_path: Path) -> None:
        with (
            open_storage("fsspec", {"url": f"file://{tmp_path}/kv"}) as inner,
            sealed_over(inner) as storage,
        ):
            storage.open_space(SPACE)
            put(storage)
            space_id = stored_under(SPACE, A)[0].id
            (tmp_path / "kv" / space_id / "manifest.json").write_text("{}")

            assert [space_id] == [one.space_id for one in storage.unreadable_spaces()]
            assert storage.remove_space(space_id) == 1
            assert [] == list(storage.unreadable_spaces())

    def test_removal_knows_a_sealed_key_space_by_either_id(self, shared: MemoryStorage) -> None:
        storage = sealed_over(shared, "a")
        put(storage)

        assert storage.remove_space(stored_under(SPACE, A, "c")[0].id) == 1
        assert got(storage) is not None
        assert storage.remove_space(storage_id := SPACE.id) == 1
        assert storage.remove_space(storage_id) == 0
        assert [SPACE] == list(shared.spaces())  # it is not sealed, and has the same id

    def test_diagnose_tells_of_other_keys_and_of_plain_key_spaces(
        self, shared: MemoryStorage
    ) -> None:
        put(sealed_over(shared, "a"))
        found = {one.topic: one for one in sealed_over(shared, "a").diagnose()}

        assert "that the name key 'a' does not open: 1" in found["other keys"].fact
        assert found["other keys"].advice
        assert found["not sealed"].fact.endswith(": 1")
        assert not found["not sealed"].advice

    def test_a_backend_that_lists_nothing_has_nothing_to_tell(self, inner: MemoryStorage) -> None:
        inner.narrow(enumerable=False)
        storage = sealed_over(inner)

        assert [] == list(storage.unreadable_spaces())
        assert ["keys"] == [one.topic for one in storage.diagnose()]


class TestTimeLimit:
    def test_pages_that_cannot_be_sealed_in_time_are_refused(self, inner: MemoryStorage) -> None:
        with sealed_over(inner, timeout_s=1e-9) as storage:
            assert [False, False] == storage.batch_set(SPACE, [A, B], [page(), page()])
            assert storage.stats().counters["refused_unsealed"] == 2
            assert [False, False] == storage.batch_exists(SPACE, [A, B])

    def test_pages_that_cannot_be_opened_in_time_are_misses_and_stay(
        self, inner: MemoryStorage
    ) -> None:
        put(sealed_over(inner))
        late = sealed_over(inner, timeout_s=1e-9)

        assert got(late) is None
        assert late.stats().counters["unopened"] == 1
        assert got(sealed_over(inner)) is not None

    def test_nothing_is_deleted_without_time_for_another_call(self, inner: MemoryStorage) -> None:
        """A get makes at most two calls of the backend, each of which has half of the time."""
        clock = [0.0]

        class Slow(WrapperStorage):
            def batch_get(
                self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
            ) -> list[bool]:
                clock[0] += 11.0
                return super().batch_get(space, hashes, pages)

            def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
                return pytest.fail("a second call would end too late")

        plant(inner, SPACE, A, bytes(4096 + HEADER_NBYTES))
        with pytest.MonkeyPatch.context() as patches, sealed_over(Slow(inner)) as storage:
            patches.setattr(
                "hicache_storage.backend_support.deadline.time.monotonic", lambda: clock[0]
            )
            assert got(storage) is None

    def test_a_slow_replacement_leaves_no_time_to_seal(self, inner: MemoryStorage) -> None:
        """A set makes at most two calls of the backend, each of which has half of the time."""
        clock = [0.0]

        class Slow(WrapperStorage):
            def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
                clock[0] += 11.0
                return super().batch_delete(space, hashes)

        inner.narrow(overwrites=False)
        put(sealed_over(inner, "ab", current_key="b"))
        with pytest.MonkeyPatch.context() as patches, sealed_over(Slow(inner)) as storage:
            patches.setattr(
                "hicache_storage.backend_support.deadline.time.monotonic", lambda: clock[0]
            )
            assert got(storage) is None
            assert [False] == storage.batch_set(SPACE, [A], [page()])
            put(storage)


class TestDelegation:
    @pytest.mark.parametrize("scatters", [True, False])
    def test_it_is_revocable_over_any_backend_that_scatters(self, scatters: bool) -> None:  # noqa: FBT001
        inner = MemoryStorage()
        inner.narrow(revocable=False, scatter_gather=scatters)

        assert sealed_over(inner).capabilities.revocable is scatters

    def test_it_claims_what_the_backend_claims(self) -> None:
        inner = MemoryStorage()
        inner.narrow(parallelism=3, max_batch=7, max_page_nbytes=5000)
        capabilities = sealed_over(inner).capabilities

        assert (3, 7) == (capabilities.parallelism, capabilities.max_batch)
        assert Durability.PROCESS == capabilities.durability
        assert not capabilities.bounded
        assert 5000 - HEADER_NBYTES == capabilities.max_page_nbytes

    @pytest.mark.parametrize("page_nbytes", [1, 100, 5000, 40_000])
    def test_its_largest_batch_fits_the_backend_with_its_headers(self, page_nbytes: int) -> None:
        inner = MemoryStorage()
        inner.narrow(max_batch_nbytes=100_000)

        pages = sealed_over(inner).capabilities.fitting_pages(100_000, page_nbytes)

        assert pages * (page_nbytes + HEADER_NBYTES) <= 100_000

    def test_a_page_whose_sealed_form_is_too_large_is_refused(self) -> None:
        with (
            open_storage_over({"capacity_nbytes": 4096 + HEADER_NBYTES - 1}) as storage,
            pytest.raises(
                UnsupportedOperation,
                match=r"EncryptedStorage takes pages of up to 4.00 KiB \(4,095 bytes\)",
            ),
        ):
            storage.open_space(SPACE)

    def test_listings_have_the_names_and_sizes_of_pages(self, storage: EncryptedStorage) -> None:
        storage.open_space(SPACE)
        put(storage, A)
        put(storage, B)

        assert [SPACE] == list(storage.spaces())
        assert {PageInfo(A, 4096), PageInfo(B, 4096)} == set(storage.scan(SPACE))

    def test_pages_of_others_in_the_same_backend_are_not_listed(
        self, storage: EncryptedStorage, inner: MemoryStorage
    ) -> None:
        inner.open_space(space())
        inner.batch_set(space(), [A], [page()])
        inner_space, _ = stored_under(SPACE, A)
        short = "ab" * 8
        inner.batch_set(inner_space, [short], [Page(bytearray(inner_space.stored_nbytes))])

        assert [SPACE] == list(storage.spaces())
        assert [] == list(storage.scan(SPACE))

    def test_page_times_are_those_of_the_sealed_page(self, tmp_path: Path) -> None:
        with over_files(tmp_path) as storage:
            storage.open_space(SPACE)
            put(storage)
            (times, missing) = storage.page_times(SPACE, [A, B])

        assert times.written_at_s is not None
        assert missing.written_at_s is None

    def test_the_interval_of_noted_uses_is_the_backends(self) -> None:
        class Noting(MemoryStorage):
            def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
                del space
                return [PageTimes(used_at_s=1.0, used_within_s=30.0)] * len(hashes)

        (times,) = sealed_over(Noting()).page_times(SPACE, [A])

        assert times.used_within_s == 30.0

    def test_figures_are_the_backends_with_counters_added(self, storage: EncryptedStorage) -> None:
        put(storage)
        stats = storage.stats()

        assert (1, 4096 + HEADER_NBYTES) == (stats.pages, stats.nbytes)
        assert stats.counters == {"refused_no_space": 0}

    def test_closing_it_closes_the_backend(self, inner: MemoryStorage) -> None:
        storage = sealed_over(inner)
        put(storage)
        storage.close()
        storage.close()

        for closed in (inner, storage):
            with pytest.raises(StorageClosed):
                closed.batch_exists(SPACE, [A])

    def test_a_store_that_would_be_made_is_named(self, tmp_path: Path) -> None:
        config = {"backend": "file", "config": {"path": f"{tmp_path}/kv"}, **key_files(tmp_path)}

        assert f"{tmp_path}/kv" == EncryptedStorage.would_create(config)

    def test_it_works_in_a_forked_child_where_the_backend_does(self, tmp_path: Path) -> None:
        with over_files(tmp_path) as storage:
            storage.open_space(SPACE)
            put(storage, A)

            def child() -> tuple[bytes | None, bool]:
                put(storage, B)
                found = got(storage, A)
                storage.close()
                return found, got_after_close(storage)

            assert (got(storage, A), False) == in_a_fork(child)
            assert got(storage, B) is not None

    def test_an_unavailable_backend_is_an_error_not_a_miss(self) -> None:
        faulty = FaultyStorage(MemoryStorage(), [Odds("batch_get", Fault.RAISE, 1.0)])
        with sealed_over(faulty) as storage, pytest.raises(StorageUnavailable):
            storage.batch_get(SPACE, [A], [blank()])


class TestDiagnosis:
    def test_the_keys_in_use_are_named_and_never_shown(self, inner: MemoryStorage) -> None:
        found = repr(sealed_over(inner, "ab", current_key="b").diagnose())

        assert "2 keys; 'b' seals new pages, and 'a' seals names" in found
        assert not any(key.hex() in found or repr(key) in found for key in KEYS.values())

    @pytest.mark.parametrize(("mode", "told"), [(0o400, False), (0o440, False), (0o444, True)])
    def test_a_key_file_that_everybody_may_read_is_told(
        self, tmp_path: Path, mode: int, *, told: bool
    ) -> None:
        fields = key_files(tmp_path)
        (tmp_path / "a.key").chmod(mode)
        with EncryptedStorage.from_config({"backend": "memory", **fields}) as storage:
            topics = [one.topic for one in storage.diagnose()]

        assert told is ("key file" in topics)

    def test_a_key_file_that_is_gone_is_no_error(self, tmp_path: Path) -> None:
        fields = key_files(tmp_path)
        with EncryptedStorage.from_config({"backend": "memory", **fields}) as storage:
            (tmp_path / "a.key").unlink()

            assert ["keys"] == [one.topic for one in storage.diagnose()]

    def test_a_warning_about_a_page_has_no_secret(
        self, storage: EncryptedStorage, inner: MemoryStorage, caplog: pytest.LogCaptureFixture
    ) -> None:
        put(sealed_over(inner, "ab", current_key="b"))
        got(storage)

        assert re.search(f"page {A} does not open: its key 'b' is not listed", caplog.text)


def open_storage_over(config: dict[str, Any]) -> HiCacheStorage:
    """Open an encrypted `memory` by its name."""
    fields: dict[str, Any] = {"keys": {"a": {"env": "A_KEY"}}, "current_key": "a"}
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("A_KEY", KEYS["a"].hex())
        return open_storage("encrypted", {"backend": "memory", "config": config, **fields})


def got_after_close(storage: HiCacheStorage) -> bool:
    """Return True if a lookup on a closed storage still finds a page."""
    try:
        return storage.batch_exists(SPACE, [A])[0]
    except StorageClosed:
        return False
