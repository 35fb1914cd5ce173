"""`mooncake` against a real master: what the backend does about faults of the client library."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import blank, hash_of, page, space
from servers import MooncakeMaster, MooncakeNode, library_path, load_mooncake, wait_until

from hicache_storage import open_storage
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import (
    BackendNotInstalled,
    StorageClosed,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage

load_mooncake()
native_module: Any = importlib.import_module("mooncake.store")

driver: Any = importlib.import_module("hicache_backends.mooncake.driver")
client_class: Any = importlib.import_module("hicache_backends.mooncake.client").Client
deferred_closes: Any = importlib.import_module(
    "hicache_backends.mooncake.lifecycle"
).DEFERRED_CLOSES

SPACE = space()
A, B, C = hash_of(1), hash_of(2), hash_of(3)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with (
        MooncakeMaster(tmp_path_factory.mktemp("master")) as started,
        opened(started),  # all tests share this native client, because a close takes two seconds
    ):
        yield started


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """Run the master of one test, which the test may kill."""
    with MooncakeMaster(tmp_path / "master") as started:
        yield started


@pytest.fixture
def store(master: MooncakeMaster, tmp_path: Path) -> Iterator[HiCacheStorage]:
    with opened(master, extra_backend_tag=tmp_path.name) as storage:
        yield storage


def opened(master: MooncakeMaster, **fields: Any) -> HiCacheStorage:
    storage = open_storage("mooncake", master.config(**{"timeout_s": 3, **fields}))
    storage.open_space(SPACE)
    return storage


def native_of(storage: HiCacheStorage) -> Any:
    return vars(storage)["_client"]._native


def key_of(storage: HiCacheStorage, page_hash: str) -> str:
    return str(vars(storage)["_layout"].page(SPACE.id, page_hash))


def test_a_page_of_registered_memory_moves_without_a_copy(
    store: HiCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = bytearray(page(seed=1).tobytes() + bytes(8192))
    store.register_buffer(pool)
    monkeypatch.setattr("hicache_backends.mooncake.transfers._staging", pytest.fail)
    view = memoryview(pool)

    assert [True] == store.batch_set(SPACE, [A], [Page(view[:100], view[100:4096])])
    assert [True] == store.batch_get(SPACE, [A], [Page(view[5000:5001], view[8000:12095])])
    assert pool[5000:5001] + pool[8000:12095] == page(seed=1).tobytes()
    store.unregister_buffer(pool)


def test_a_buffer_that_two_storages_register_stays_registered_for_the_second(
    store: HiCacheStorage, master: MooncakeMaster
) -> None:
    pool = bytearray(4096)
    with opened(master) as other:
        other.register_buffer(pool)
        store.register_buffer(pool)
    client = vars(store)["_client"]

    assert client.registered.outside([Page(pool)], [0]) == []
    store.unregister_buffer(pool)
    assert client.registered.outside([Page(pool)], [0]) == [0]


def test_a_buffer_that_overlaps_another_is_counted_and_its_pages_are_copied(
    store: HiCacheStorage,
) -> None:
    pool = memoryview(bytearray(8192))
    store.register_buffer(pool[:4096])
    store.register_buffer(pool[2048:])
    assert store.stats().counters["buffers_not_registered"] == 1
    assert [True] == store.batch_set(SPACE, [A], [Page(pool[2048:6144])])


@pytest.mark.parametrize("nbytes", [1, 4095, 4097, 9000])
def test_an_object_of_another_size_is_a_miss_and_the_next_set_heals_it(
    store: HiCacheStorage, nbytes: int
) -> None:
    native_of(store).put(key_of(store, A), bytes(nbytes))

    assert [False] == store.batch_get(SPACE, [A], [blank()])
    assert [True] == store.batch_set(SPACE, [A], [page(seed=1)])
    assert [True] == store.batch_get(SPACE, [A], [found := blank()])
    assert page(seed=1).tobytes() == found.tobytes()


def test_a_page_that_was_just_read_is_deleted_when_its_lease_has_ended(
    store: HiCacheStorage,
) -> None:
    store.batch_set(SPACE, [A], [page()])
    store.batch_get(SPACE, [A], [blank()])

    assert [True, True] == store.batch_delete(SPACE, [A, B])
    assert [False] == store.batch_exists(SPACE, [A])


def test_a_page_that_is_leased_for_longer_than_a_call_may_take_is_not_deleted(
    tmp_path: Path,
) -> None:
    with (
        MooncakeMaster(tmp_path, "--default_kv_lease_ttl=60s") as master,
        opened(master, timeout_s=0.5) as storage,
    ):
        storage.batch_set(SPACE, [A, B], [page(), page()])
        storage.batch_get(SPACE, [A], [blank()])

        assert [False, True] == storage.batch_delete(SPACE, [A, B])
        assert storage.stats().counters["leased_pages"] == 1
        with pytest.raises(StorageTimeout, match="0 of 1 page cleared, but the others are leased"):
            storage.clear(SPACE)
        assert [True] == storage.batch_get(SPACE, [A], [blank()])


def test_clear_removes_the_pages_of_one_key_space_only(store: HiCacheStorage) -> None:
    other = space(model="other")
    store.open_space(other)
    native = native_of(store)
    native.put(f"x{key_of(store, A)}", b"another program's")
    for where in (SPACE, other):
        store.batch_set(where, [A, B], [page(), page()])
    store.batch_get(SPACE, [A], [blank()])

    assert store.clear(SPACE) == 2
    assert [False, False] == store.batch_exists(SPACE, [A, B])
    assert [True, True] == store.batch_exists(other, [A, B])
    assert native.is_exist(f"x{key_of(store, A)}") == 1
    assert {SPACE, other} == set(store.spaces())


def test_a_tag_is_taken_literally(master: MooncakeMaster) -> None:
    with (
        opened(master, extra_backend_tag="a.b") as one,
        opened(master, extra_backend_tag="axb") as two,
    ):
        one.batch_set(SPACE, [A], [page()])
        two.batch_set(SPACE, [A], [page()])

        assert one.clear(SPACE) == 1
        assert [A] == [info.page_hash for info in two.scan(SPACE)]


def test_storages_of_one_config_share_a_client(
    store: HiCacheStorage, master: MooncakeMaster
) -> None:
    with opened(master) as other:
        assert native_of(other) is native_of(store)
    assert native_of(store).is_exist("nothing") == 0  # the first close left the client open


def test_a_full_cluster_refuses_pages_until_capacity_is_free(
    own_master: MooncakeMaster,
) -> None:
    large = space(page_nbytes=1 << 20)
    hashes = [hash_of(number) for number in range(40)]
    with opened(own_master, global_segment_size="32mb") as storage:
        storage.open_space(large)
        stored = storage.batch_set(
            large, hashes, [page(1 << 20, seed=number) for number in range(40)]
        )
        targets = [blank(1 << 20) for _ in hashes]
        read = storage.batch_get(large, hashes, targets)

        assert 0 < stored.count(True) < 40
        assert storage.stats().counters["refused_pages"] == stored.count(False)
        for number, (ok, target) in enumerate(zip(read, targets, strict=True)):
            assert not ok or target.tobytes() == page(1 << 20, seed=number).tobytes()
        storage.clear(large)
        assert [True] == storage.batch_set(large, [hash_of(40)], [page(1 << 20)])


def test_a_killed_master_is_an_error_at_once_and_works_again_when_it_is_back(
    own_master: MooncakeMaster,
) -> None:
    with opened(own_master) as storage:
        storage.batch_set(SPACE, [A], [page()])
        own_master.stop()
        for _ in range(3):
            began_s = time.monotonic()
            with pytest.raises(StorageUnavailable):
                storage.batch_get(SPACE, [A], [blank()])
            assert time.monotonic() - began_s < 4
        own_master.start()

        assert [False] == storage.batch_exists(SPACE, [A])  # a restarted master has no pages
        wait_until(lambda: storage.batch_set(SPACE, [A], [page()]) == [True])
        storage.batch_set(SPACE, [B], [page()])
        assert [SPACE] == list(storage.spaces())  # the manifest came back with the pages


def test_a_master_that_hangs_is_a_timeout_and_close_still_ends(own_master: MooncakeMaster) -> None:
    storage = opened(own_master, timeout_s=1)
    own_master.pause()
    wait_until(lambda: not own_master._is_ready())  # its threads stop one after another
    for call in (
        lambda: storage.batch_exists(SPACE, [A]),
        lambda: storage.batch_get(SPACE, [A], [blank()]),
        lambda: storage.batch_set(SPACE, [A], [page()]),
        lambda: storage.batch_delete(SPACE, [A]),
        lambda: storage.clear(SPACE),
        lambda: list(storage.spaces()),
    ):
        began_s = time.monotonic()
        with pytest.raises(StorageTimeout):
            call()
        assert time.monotonic() - began_s < 2
    began_s = time.monotonic()
    storage.close()
    assert time.monotonic() - began_s < 10
    own_master.resume()
    wait_until(lambda: not overdue())


def overdue() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("hicache-mooncake")]


def test_opening_on_a_master_that_hangs_is_a_timeout_and_stops_nobody(
    own_master: MooncakeMaster,
) -> None:
    own_master.pause()
    wait_until(lambda: not own_master._is_ready())  # its threads stop one after another
    began_s = time.monotonic()
    with pytest.raises(StorageTimeout):
        opened(own_master, timeout_s=1)
    assert time.monotonic() - began_s < 2
    own_master.resume()


def test_a_master_that_hangs_is_noticed_without_its_http_port(own_master: MooncakeMaster) -> None:
    own_master.pause()
    wait_until(lambda: not own_master._is_ready())
    with pytest.raises(StorageTimeout):
        opened(own_master, timeout_s=1, master_metrics_port=1)
    own_master.resume()


def segments_of(master: MooncakeMaster) -> list[str]:
    url = f"http://127.0.0.1:{master.metrics_port}/get_all_segments"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read(), "utf-8").split()


def test_a_client_that_was_closed_without_its_master_leaves_when_that_is_back(
    own_master: MooncakeMaster,
) -> None:
    storage = opened(own_master)
    assert len(segments_of(own_master)) == 1
    own_master.stop()
    storage.close()
    own_master.start()

    wait_until(lambda: not deferred_closes._waiting)
    assert segments_of(own_master) == []


def test_closing_on_a_master_that_hangs_stops_nobody(own_master: MooncakeMaster) -> None:
    storage = opened(own_master, timeout_s=1)
    own_master.pause()
    wait_until(lambda: not own_master._is_ready())  # its threads stop one after another
    began_s = time.monotonic()
    storage.close()
    assert time.monotonic() - began_s < 3
    own_master.resume()


def test_no_master_is_unavailable_at_once(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(StorageUnavailable, match="is mooncake_master running"):
        open_storage("mooncake", MooncakeMaster(tmp_path).config())
    assert time.monotonic() - began_s < 1


def test_no_native_call_is_made_after_close(master: MooncakeMaster) -> None:
    storage = opened(master, global_segment_size="32mb")  # another config has a client of its own
    client = vars(storage)["_client"]
    storage.close()
    storage.close()

    with pytest.raises(StorageClosed):
        storage.batch_exists(SPACE, [A])
    with pytest.raises(StorageClosed):
        client.call(pytest.fail, 1)  # a native call would crash now


def test_a_tenant_s_pages_are_not_listed(master: MooncakeMaster) -> None:
    with (
        opened(master, tenant_id="somebody") as storage,
        pytest.raises(UnsupportedOperation),
    ):
        storage.scan(SPACE)


THEIRS = [hash_of(number) for number in range(100, 164)]


def hold_a_segment(config: dict[str, Any], pipe: Connection) -> None:
    """Store pages in another process, some of them in its own segment, and read one page."""
    load_mooncake()
    with open_storage("mooncake", config) as storage:
        storage.open_space(SPACE)
        stored = storage.batch_set(SPACE, THEIRS, [page(seed=2) for _ in THEIRS])
        read = storage.batch_get(SPACE, [A], [found := blank()])
        pipe.send((all(stored), read, found.tobytes()))
        pipe.recv()


def test_a_read_that_takes_longer_than_its_lease_is_a_miss(tmp_path: Path) -> None:
    large = space(page_nbytes=32 << 20)
    with (
        MooncakeMaster(tmp_path, "--default_kv_lease_ttl=1ms") as master,
        opened(master) as storage,
    ):
        storage.open_space(large)
        assert [True] == storage.batch_set(large, [A], [page(32 << 20)])
        assert [False] == storage.batch_get(large, [A], [blank(32 << 20)])


def test_two_processes_on_two_segments_share_pages_and_a_dead_one_s_are_misses(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with (  # the lease outlasts the wait for the dead peer
        MooncakeMaster(tmp_path, "--default_kv_lease_ttl=10s") as own_master,
        opened(own_master) as storage,
    ):
        storage.batch_set(SPACE, [A], [page(seed=1)])
        peer = context.Process(target=hold_a_segment, args=(own_master.config(), there))
        peer.start()
        assert (True, [True], page(seed=1).tobytes()) == here.recv()
        shared = [blank() for _ in THEIRS]
        assert all(storage.batch_get(SPACE, THEIRS, shared))
        assert {page(seed=2).tobytes()} == {found.tobytes() for found in shared}

        peer.kill()
        peer.join()
        began_s = time.monotonic()
        left = storage.batch_get(SPACE, [A, *THEIRS], [blank() for _ in [A, *THEIRS]])
        assert time.monotonic() - began_s < 5
        assert left[0] is True
        assert False in left
    here.close()
    there.close()


def test_a_client_that_gave_up_a_transfer_is_replaced_before_the_call_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_backends.mooncake.transfers._GIVEN_UP_S", 0)
    with (
        MooncakeMaster(tmp_path, "--default_kv_lease_ttl=10s") as master,
        opened(master, global_segment_size=0, timeout_s=8) as storage,
    ):
        pool = bytearray(4096)
        storage.register_buffer(pool)
        with MooncakeNode(master, "64mb") as node:
            assert [True] == storage.batch_set(SPACE, [A], [page(seed=1)])
            os.kill(node.pid, signal.SIGKILL)
            with pytest.raises(StorageTimeout, match="the client was replaced"):
                storage.batch_get(SPACE, [A], [Page(pool)])
        storage.stats()
        retired = vars(storage)["_client"]
        assert retired.retired, "a look at the counters has joined the cluster again"
        with pytest.raises(StorageUnavailable, match="is being replaced"):
            retired.call(str, Deadline(1.0))

        assert [False] == storage.batch_exists(SPACE, [B])
        client = vars(storage)["_client"]
        assert client is not retired
        assert retired.native() is None
        assert client.registered.outside([Page(pool)], [0]) == []


def test_a_call_that_was_given_up_ends_without_the_master_if_the_process_lends_nothing(
    own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_and_lose_the_master(*arguments: Any) -> Any:
        codes = native.batch_get_into(*arguments)
        own_master.stop()
        return codes

    monkeypatch.setattr("hicache_backends.mooncake.transfers._GIVEN_UP_S", 0)
    with opened(own_master, global_segment_size=0, timeout_s=8) as storage:
        pool = bytearray(4096)
        storage.register_buffer(pool)
        with MooncakeNode(own_master, "64mb") as node:
            assert [True] == storage.batch_set(SPACE, [A], [page(seed=1)])
            os.kill(node.pid, signal.SIGKILL)
            native = replace_native_method(
                monkeypatch, storage, "batch_get_into", get_and_lose_the_master
            )
            with pytest.raises(StorageTimeout, match="the client was replaced"):
                storage.batch_get(SPACE, [A], [Page(pool)])


def test_a_storage_that_was_closed_meanwhile_gets_no_new_client(tmp_path: Path) -> None:
    with MooncakeMaster(tmp_path) as master, opened(master, global_segment_size=0) as storage:
        held: Any = storage
        vars(storage)["_client"].retired = True
        storage.close()

        with pytest.raises(StorageClosed):
            held._replace_client(Deadline(1.0))


@contextmanager
def retired(master: MooncakeMaster, timeout_s: float) -> Generator[HiCacheStorage]:
    """Yield a storage whose next call joins the cluster again."""
    with opened(master, global_segment_size=0, timeout_s=timeout_s) as storage:
        client = client_of(storage)
        client.retired = True
        yield storage
        client.close()


def test_joining_again_and_the_call_share_one_time_limit(
    own_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_slowly(client: Any, deadline: Deadline) -> None:
        connect(client, deadline)
        own_master.pause()  # the call itself would take all of its limit
        wait_until(lambda: deadline.remaining_s() < 0.1)

    connect = client_class.connect
    with retired(own_master, timeout_s=1.5) as storage:
        monkeypatch.setattr(client_class, "connect", connect_slowly)
        began_s = time.monotonic()
        with pytest.raises(StorageTimeout):
            storage.batch_exists(SPACE, [A])
        assert time.monotonic() - began_s < 2.5
        own_master.resume()


def test_a_call_whose_limit_is_used_up_by_joining_again_moves_no_page(
    master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_slowly(client: Any, deadline: Deadline) -> None:
        connect(client, deadline)
        wait_until(deadline.passed)

    connect = client_class.connect
    pool = bytearray(4096)
    with retired(master, timeout_s=0.5) as storage:
        monkeypatch.setattr(client_class, "connect", connect_slowly)
        with pytest.raises(StorageTimeout, match="joining the cluster again did not end within"):
            storage.register_buffer(pool)
        assert client_of(storage).registered.outside([Page(pool)], [0]) == [0]
        storage.register_buffer(pool)  # the new client is there
        assert client_of(storage).registered.outside([Page(pool)], [0]) == []


def test_a_call_waits_within_its_limit_for_another_that_joins_again(master: MooncakeMaster) -> None:
    with (
        retired(master, timeout_s=0.2) as storage,
        vars(storage)["_lock"],
        pytest.raises(StorageTimeout, match="joining the cluster again"),
    ):
        storage.batch_exists(SPACE, [A])


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("master_dies", [False, True])
def test_no_byte_changes_after_a_get_whose_peer_hangs_for_longer_than_the_client_waits(
    tmp_path: Path, *, master_dies: bool
) -> None:
    """The client drops a connection after 30 s and gives up after 60 s, but other pages still arrive."""
    nbytes, hashes = 1 << 20, [hash_of(number) for number in range(64)]
    large = space(page_nbytes=nbytes)
    with (
        MooncakeMaster(tmp_path, "--default_kv_lease_ttl=200s") as master,
        opened(master, global_segment_size=0, timeout_s=100) as storage,
        MooncakeNode(master, "128mb") as node,
    ):
        storage.open_space(large)
        assert all(storage.batch_set(large, hashes, [page(nbytes, n) for n in range(64)]))
        pool = np.ones(64 * nbytes, np.uint8)
        storage.register_buffer(pool)
        os.kill(node.pid, signal.SIGSTOP)
        pages = [Page(part) for part in np.split(pool, 64)]
        dies = threading.Timer(2, master.stop if master_dies else str)
        dies.start()
        began_s = time.monotonic()
        with pytest.raises(StorageTimeout, match="the client was replaced"):
            storage.batch_get(large, hashes, pages)
        assert time.monotonic() - began_s < 65

        pool[:] = 7  # the engine reuses its memory
        os.kill(node.pid, signal.SIGCONT)
        dies.join()
        if master_dies:
            master.start()
        wait_until(lambda: storage.batch_set(large, [hash_of(64)], [blank(nbytes)]) == [True])
        assert (pool == 7).all()


def test_a_wheel_without_the_system_s_libraries_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(BackendNotInstalled, match=r"libibverbs\.so\.1 .*apt install"):
        driver.load()


def test_all_libraries_that_are_missing_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dynamic loader itself names only the first missing library."""
    wheel = tmp_path / "mooncake"
    wheel.mkdir()
    (wheel / "__init__.py").touch()
    compiler, libraries = shutil.which("cc"), ("libibverbs.so.1", "libcuda.so.1")
    assert compiler
    shared = (compiler, "-shared", "-Wl,--no-as-needed", "-xc", "/dev/null", "-xnone")
    for library in libraries:
        options = (f"-Wl,-soname,{library}", "-o", tmp_path / library)
        subprocess.run([*shared, *options], check=True)
    needed = [tmp_path / library for library in libraries]
    subprocess.run([*shared, *needed, "-o", wheel / "store.so"], check=True)
    for path in needed:
        path.unlink()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)

    with pytest.raises(
        BackendNotInstalled, match=r"libibverbs\.so\.1 .*apt install.*libcuda\.so\.1 .*non-cuda"
    ):
        driver.load()


def test_a_wheel_without_the_gpu_s_driver_says_which_other_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file: No such file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(BackendNotInstalled, match=r"libcuda\.so\.1 .*non-cuda"):
        driver.load()


# --- a master, a peer or a name server that does not answer ---------------------------------------
# Nothing is removed, left out or blocked because of a missing answer.

master_module: Any = importlib.import_module("hicache_backends.mooncake.master")
parse_settings: Any = importlib.import_module("hicache_backends.mooncake.settings").parse_settings
HASHES = [hash_of(number) for number in range(8)]
FIRST = HASHES[0]
LIMIT_S = 30.0


def client_of(storage: HiCacheStorage) -> Any:
    return vars(storage)["_client"]


class ReplacedMethod:
    """The native client with one method replaced."""

    def __init__(self, native: Any, name: str, method: Callable[..., Any]) -> None:
        self._native = native
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def replace_native_method(
    monkeypatch: pytest.MonkeyPatch, storage: HiCacheStorage, name: str, method: Callable[..., Any]
) -> Any:
    """Replace a method of the native client; return the client."""
    native = client_of(storage)._native
    monkeypatch.setattr(client_of(storage), "_native", ReplacedMethod(native, name, method))
    return native


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for any arguments."""

    def same(*_: Any, **__: Any) -> Any:
        return value

    return same


def pages(seed: int = 0) -> list[Any]:
    return [page(seed=seed) for _ in HASHES]


class TestSizes:
    def test_unknown_sizes_remove_no_page(
        self, store: HiCacheStorage, master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.batch_set(SPACE, HASHES, pages())
        tag = vars(store)["_settings"].extra_backend_tag
        with opened(master, extra_backend_tag=tag, timeout_s=0.5) as hasty:
            with monkeypatch.context() as patch:
                replace_native_method(patch, hasty, "batch_get_replica_desc", always({}))
                with pytest.raises(StorageTimeout):
                    hasty.batch_set(SPACE, HASHES, pages())

            assert "wrong_size" not in hasty.stats().counters
            assert hasty.batch_exists(SPACE, HASHES) == [True] * len(HASHES)

    def test_sizes_from_a_repeated_query_are_used(
        self, store: HiCacheStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.batch_set(SPACE, HASHES, pages())
        answers: list[Any] = [{}, {}]
        native = client_of(store)._native

        def described(keys: list[str]) -> Any:
            return answers.pop() if answers else native.batch_get_replica_desc(keys)

        replace_native_method(monkeypatch, store, "batch_get_replica_desc", described)

        assert store.batch_set(SPACE, HASHES, pages()) == [True] * len(HASHES)
        answers.append({})
        assert set(HASHES) == {info.page_hash for info in store.scan(SPACE)}

    def test_a_page_of_another_size_is_not_taken_from_its_readers(self, tmp_path: Path) -> None:
        """Readers hold a lease on the page.

        A forced removal would free the page's memory in the middle of a read.
        """
        with (
            MooncakeMaster(tmp_path, "--default_kv_lease_ttl=60s") as own_master,
            opened(own_master, timeout_s=1) as storage,
        ):
            native = client_of(storage)._native
            native.put(key_of(storage, FIRST), b"shorter")

            assert storage.batch_set(SPACE, HASHES, pages()) == [False] + [True] * 7
            assert native.get(key_of(storage, FIRST)) == b"shorter"
            assert storage.stats().counters["wrong_size"] == 1

    def test_a_set_that_was_given_up_removes_nothing_afterwards(
        self, master: MooncakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = threading.Event()
        with opened(master, extra_backend_tag=tmp_path.name, timeout_s=0.5) as storage:
            native = client_of(storage)._native
            native.put(key_of(storage, FIRST), b"shorter")

            def described(keys: list[str]) -> Any:
                gate.wait(LIMIT_S)
                return native.batch_get_replica_desc(keys)

            with monkeypatch.context() as patch:
                replace_native_method(patch, storage, "batch_get_replica_desc", described)
                with pytest.raises(StorageTimeout):
                    storage.batch_set(SPACE, HASHES, pages())
                gate.set()
                wait_until(lambda: not client_of(storage).is_busy())

            assert native.get(key_of(storage, FIRST)) == b"shorter"

    def test_a_removal_that_comes_too_late_is_not_made(self, store: HiCacheStorage) -> None:
        store.batch_set(SPACE, HASHES, pages())
        remove: Any = importlib.import_module("hicache_backends.mooncake.objects").remove
        with pytest.raises(StorageTimeout):
            remove([key_of(store, FIRST)], Deadline(0), client_of(store)._native)

        assert store.batch_exists(SPACE, [FIRST]) == [True]


class TestListing:
    def test_a_manifest_that_was_not_returned_is_requested_again(
        self, store: HiCacheStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.batch_set(SPACE, HASHES, pages())
        native = client_of(store)._native
        answers = [b"", b""]

        def get(key: str) -> Any:
            return answers.pop() if answers else native.get(key)

        replace_native_method(monkeypatch, store, "get", get)

        assert [SPACE] == list(store.spaces())

    def test_keys_that_name_no_page_are_not_cleared(self, store: HiCacheStorage) -> None:
        store.batch_set(SPACE, HASHES, pages())
        native = client_of(store)._native
        foreign = [key_of(store, name) for name in ("abc", "0" * 200, f"{FIRST}.bak", "MANIFEST")]
        for key in foreign:
            native.put(key, b"another program's")

        assert store.clear(SPACE) == len(HASHES)
        assert [1] * len(foreign) == native.batch_is_exist(foreign)

    @pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\n\r\n"])
    def test_a_list_of_keys_that_drips_ends_in_time(
        self, master: MooncakeMaster, head: bytes
    ) -> None:
        done = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(head)
                try:
                    while not done.wait(0.05):
                        connection.sendall(b"k")
                except OSError:  # the client closed the connection
                    done.set()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=drip, daemon=True)
            thread.start()
            port = listener.getsockname()[1]
            with opened(master, timeout_s=0.5, master_metrics_port=port) as storage:
                began_s = time.monotonic()
                with pytest.raises(StorageTimeout, match="list of keys"):
                    storage.clear(SPACE)
                assert time.monotonic() - began_s < 1.5
                assert done.wait(LIMIT_S)  # the client stopped reading
            thread.join(LIMIT_S)


class TestProbe:
    def test_a_name_server_that_hangs_is_silence_in_time_and_one_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = threading.Event()

        def hang(*_: Any, **__: Any) -> list[Any]:
            gate.wait(LIMIT_S)
            return []

        monkeypatch.setattr(socket, "getaddrinfo", hang)
        settings = parse_settings({"master_server_address": "hung.test:1"})
        for _ in range(3):
            began_s = time.monotonic()
            assert master_module.probe_master(settings, 0.2) is master_module.MasterState.SILENT
            assert time.monotonic() - began_s < 1
        assert 1 == len([one for one in threading.enumerate() if "look-up" in one.name])
        gate.set()

    def test_all_addresses_share_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = silent.getsockname()
            found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address)] * 20
            monkeypatch.setattr(socket, "getaddrinfo", always(found))
            settings = parse_settings({"master_server_address": f"many.test:{address[1]}"})
            began_s = time.monotonic()
            assert master_module.probe_master(settings, 0.3) is master_module.MasterState.SILENT
            assert time.monotonic() - began_s < 1.3


def test_whatever_the_library_raises_is_unavailable(
    store: HiCacheStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("bad variant access")

    replace_native_method(monkeypatch, store, "batch_is_exist", fail)
    with pytest.raises(StorageUnavailable, match="RuntimeError"):
        store.batch_exists(SPACE, HASHES)


def run(code: str, *arguments: str) -> tuple[int, float, str]:
    """Run a program until it ends; return its status, duration and output."""
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROLOGUE) + textwrap.dedent(code), *arguments],
        env={**library_path(), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.returncode, time.monotonic() - began_s, ended.stdout + ended.stderr


_PROLOGUE = """
    import os, signal, sys, time
    from servers import load_mooncake
    load_mooncake()
    from hicache_storage import open_storage
    from hicache_storage.errors import StorageClosed, StorageTimeout, StorageUnavailable
    from pages import blank, hash_of, page, space

    config = eval(sys.argv[1])
    storage = open_storage("mooncake", config)
    storage.open_space(space())
    assert storage.batch_set(space(), [hash_of(1)], [page()]) == [True]

    def hits():
        return storage.batch_get(space(), [hash_of(1)], [blank()])
"""


@pytest.mark.parametrize("closes", [True, False])
def test_the_interpreter_ends_in_time_and_in_order_beside_a_call_that_is_overdue(
    tmp_path: Path, *, closes: bool
) -> None:
    with MooncakeMaster(tmp_path) as own_master:
        status, took_s, output = run(
            """
            os.kill(int(sys.argv[2]), signal.SIGSTOP)
            try:
                while True:  # its threads stop one after another
                    storage.batch_exists(space(), [hash_of(1)])
            except StorageTimeout:
                print("overdue")
            if sys.argv[3] == "True":
                storage.close()
            sys.exit(7)
            """,
            repr(own_master.config(timeout_s=1)),
            str(own_master.pid),
            str(closes),
        )
        own_master.resume()
    assert "overdue" in output
    assert status == 7, output
    assert took_s < 20  # the call itself takes 30 s


def test_a_forked_child_is_refused_and_its_end_takes_nothing_from_its_parent(
    master: MooncakeMaster,
) -> None:
    status, _, output = run(
        """
        child = os.fork()
        if child == 0:
            for call in (hits, lambda: storage.register_buffer(bytearray(4096))):
                try:
                    call()
                except StorageClosed as refused:
                    print(refused)
                else:
                    sys.exit(1)
            try:
                open_storage("mooncake", config)
            except StorageUnavailable as refused:
                print(refused)
            else:
                sys.exit(1)
            storage.close()
            sys.exit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3, status
        assert hits() == [True]
        storage.close()
        """,
        repr(master.config(timeout_s=5, global_segment_size="32mb", extra_backend_tag="forked")),
    )
    assert status == 0, output
    assert output.count("spawn") == 3
