"""Verdicts and errors of a call when a filesystem fails."""

from __future__ import annotations

import errno
import threading
import traceback
from typing import TYPE_CHECKING

import pytest
from fsspec_stores import LIMIT_S, SECRET, SPACE, A, B, Hooks, open_store, raising
from pages import blank, page, space

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable


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

            assert [False, True] == store.batch_get(SPACE, [A, B], [blank(), blank()])
            assert {"io_errors": 1} == store.stats().counters

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
        with open_store("scripted://kv", timeout_s=0.2) as store:
            scripted.before_read = lambda _: gate.wait(LIMIT_S)
            target = blank()
            with pytest.raises(StorageTimeout, match=r"within 0.2 s"):
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
