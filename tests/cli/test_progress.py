"""The progress bar on a terminal."""

from __future__ import annotations

import pytest

from hicache_storage.cli.progress import meter


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


def test_work_of_an_unknown_size_has_no_question_marks(capsys: pytest.CaptureFixture[str]) -> None:
    with meter("copying") as shown:
        shown.begin(None)
        shown.advance(1, 2048)

    text = capsys.readouterr().err
    assert "1 page, 2 KiB" in text
    assert "?" not in text.replace("\x1b[?", "")


def test_a_listing_moves_no_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with meter("counting") as shown:
        shown.advance(2, 0)

    text = capsys.readouterr().err
    assert "2 pages" in text
    assert "0 B" not in text


def test_a_known_size_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with meter("copying") as shown:
        shown.begin(8192)
        shown.advance(2, 4096)

    assert "2 pages, 4 KiB of 8 KiB" in capsys.readouterr().err
