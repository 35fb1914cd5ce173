"""`mooncake` with a master, a peer or a name server that does not answer.

Nothing is removed, left out or blocked because of a missing answer.
"""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import hash_of, page, space
from servers import MooncakeMaster, library_path, load_mooncake, wait_until

from hicache_storage import open_storage
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.storage import HiCacheStorage

load_mooncake()
master_module: Any = importlib.import_module("hicache_backends.mooncake.master")
parse_settings: Any = importlib.import_module("hicache_backends.mooncake.settings").parse_settings

SPACE = space()
HASHES = [hash_of(number) for number in range(8)]
A = HASHES[0]
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("master")) as started, opened(started):
        yield started


@pytest.fixture
def store(master: MooncakeMaster, tmp_path: Path) -> Iterator[HiCacheStorage]:
    with opened(master, extra_backend_tag=tmp_path.name) as storage:
        yield storage


def opened(master: MooncakeMaster, **fields: Any) -> HiCacheStorage:
    storage = open_storage("mooncake", master.config(**{"timeout_s": 3, **fields}))
    storage.open_space(SPACE)
    return storage


def client_of(storage: HiCacheStorage) -> Any:
    return vars(storage)["_client"]


def key_of(storage: HiCacheStorage, page_hash: str) -> str:
    return str(vars(storage)["_layout"].page(SPACE.id, page_hash))


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

        A forced removal would free its memory in the middle of a read.
        """
        with (
            MooncakeMaster(tmp_path, "--default_kv_lease_ttl=60s") as own_master,
            opened(own_master, timeout_s=1) as storage,
        ):
            native = client_of(storage)._native
            native.put(key_of(storage, A), b"shorter")

            assert storage.batch_set(SPACE, HASHES, pages()) == [False] + [True] * 7
            assert native.get(key_of(storage, A)) == b"shorter"
            assert storage.stats().counters["wrong_size"] == 1

    def test_a_set_that_was_given_up_removes_nothing_afterwards(
        self, master: MooncakeMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = threading.Event()
        with opened(master, extra_backend_tag=tmp_path.name, timeout_s=0.5) as storage:
            native = client_of(storage)._native
            native.put(key_of(storage, A), b"shorter")

            def described(keys: list[str]) -> Any:
                gate.wait(LIMIT_S)
                return native.batch_get_replica_desc(keys)

            with monkeypatch.context() as patch:
                replace_native_method(patch, storage, "batch_get_replica_desc", described)
                with pytest.raises(StorageTimeout):
                    storage.batch_set(SPACE, HASHES, pages())
                gate.set()
                wait_until(lambda: not client_of(storage).is_busy())

            assert native.get(key_of(storage, A)) == b"shorter"

    def test_a_removal_that_comes_too_late_is_not_made(self, store: HiCacheStorage) -> None:
        store.batch_set(SPACE, HASHES, pages())
        remove: Any = importlib.import_module("hicache_backends.mooncake.objects").remove
        with pytest.raises(StorageTimeout):
            remove([key_of(store, A)], Deadline(0), client_of(store)._native)

        assert store.batch_exists(SPACE, [A]) == [True]


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
        foreign = [key_of(store, name) for name in ("abc", "0" * 200, f"{A}.bak", "MANIFEST")]
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
