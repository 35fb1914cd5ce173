"""Fixtures for the tests of the `file` backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hicache_storage import native
from hicache_storage.native import reference

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def python_data_plane() -> Iterator[None]:
    """Replace the compiled data plane, whose system calls a test cannot patch, by its reference.

    The patches outlast `monkeypatch.undo()` in the test.
    """
    with pytest.MonkeyPatch.context() as patches:
        names = ("exists_files", "check_files", "claim_files", "read_files", "write_files")
        for name in names:
            patches.setattr(native, name, getattr(reference, name))
        yield
