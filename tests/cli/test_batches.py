"""What a run of batches leaves behind when it is interrupted."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.cli.operations.batches import run_batches


def test_a_batch_whose_thread_was_just_started_ends_before_an_interrupted_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_: list[int]) -> None:
        begun.set()
        released.wait(30)
        ended.set()

    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(30)
        monkeypatch.undo()
        raise KeyboardInterrupt  # where Ctrl-C reaches the main thread

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        list(run_batches(work, [[1]], 1, stop=lambda: threading.Timer(0.3, released.set).start()))

    assert ended.is_set()
