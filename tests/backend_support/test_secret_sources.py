from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_storage.backend_support.secret_sources import read_secret_file, read_secret_variable


def test_white_space_around_the_secret_of_a_file_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(" open sesame\n")

    assert read_secret_file("password_file", f"{tmp_path}/secret") == "open sesame"


@pytest.mark.parametrize(("content", "reason"), [(b" \n", "is empty"), (b"\xff", "not hold text")])
def test_a_file_without_a_secret_is_refused_by_name(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "secret").write_bytes(content)

    with pytest.raises(
        ValueError, match=rf"^key: {re.escape(repr(f'{tmp_path}/secret'))}.*{reason}"
    ):
        read_secret_file("key", f"{tmp_path}/secret")


@pytest.mark.parametrize(
    "path",
    [
        "sesame",
        "open sesame",
        "open/sesame",
        "/open+sesame=",
        "//sesame",
        "/open/sesame",
        "sesame\0",
    ],
)
def test_a_path_that_may_be_the_secret_is_not_shown(path: str) -> None:
    """A base64 text may contain path separators anywhere, or only as its first character."""
    with pytest.raises(ValueError, match="not shown, because it names no existing dir") as caught:
        read_secret_file("key", path)

    assert "sesame" not in str(caught.value)


def test_a_missing_file_of_a_directory_that_is_there_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'{tmp_path}/secret' cannot be read: No such")):
        read_secret_file("key", f"{tmp_path}/secret")


def test_the_secret_of_a_variable_is_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "open sesame")

    assert read_secret_variable("password_env", "A_SECRET") == "open sesame"


def test_an_empty_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")

    with pytest.raises(ValueError, match="variable 'EMPTY', or it is empty"):
        read_secret_variable("key", "EMPTY")


@pytest.mark.parametrize(
    ("name", "shown"), [("NO_SUCH_VARIABLE", True), ("open sesame", False), ("A1B2C3D4", False)]
)
def test_a_missing_variable_is_named_unless_its_name_may_be_the_secret(
    name: str, *, shown: bool
) -> None:
    with pytest.raises(ValueError, match=r"^key: there is no environment variable") as caught:
        read_secret_variable("key", name)

    assert shown is (name in str(caught.value))
