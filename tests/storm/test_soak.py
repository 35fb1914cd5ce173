"""A short soak, and soaks that must find a fault."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import engines
import pytest
from storm import soak as module
from storm import soak_clients
from storm.progress import Progress
from storm.soak import soak

from hicache_storage.page_store import PageStoreSettings

pytestmark = pytest.mark.no_cover


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND", 500)
    monkeypatch.setattr(soak_clients, "EVENTS_LIMIT_S", 1)


def test_a_soak_finds_nothing_and_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    kept = tmp_path / "soak.json"
    soak(Progress.load(kept, 1), 1)
    progress = Progress.load(kept, 1)
    before = progress.figures["requests"]
    soak(progress, before + 1000)

    assert [] == progress.findings
    assert progress.figures["rounds"] > 1
    assert progress.figures["requests"] >= before + 1000
    assert progress.figures["pages handed over"] > 0


def test_a_soak_finds_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked = partial(PageStoreSettings, checksum="none")
    monkeypatch.setattr(engines, "PageStoreSettings", unchecked)
    progress = Progress(seed=0)

    soak(progress, 20_000)

    assert "was given a wrong page" in progress.findings[0]


def test_a_soak_finds_a_thread_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def leave(progress: Progress, requests: int, seed: int) -> None:
        threading.Thread(target=released.wait, daemon=True).start()

    monkeypatch.setattr(module, "_hand_over", leave)
    monkeypatch.setattr(module, "_LEFT_LIMIT_S", 0.1)
    progress = Progress(seed=0)
    try:
        soak(progress, 20_000)
    finally:
        released.set()

    assert "left thread" in progress.findings[0]
