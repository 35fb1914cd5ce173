"""`make test-sanitized` runs the sanitized module. pytest does not collect this file by itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hicache_storage import native


def test_the_module_in_use_is_sanitized() -> None:
    compiled: Any = importlib.import_module("hicache_storage.native._native")
    module = Path(compiled.__file__).read_bytes()

    assert "compiled" == native.implementation
    assert b"__asan_init" in module
    assert b"__ubsan_handle" in module
