"""The two implementations of the data plane, for tests that compare them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from hicache_storage.native import reference

try:
    compiled: Any = importlib.import_module("hicache_storage.native._native")
except ImportError:
    compiled = None

NEEDS_COMPILED = pytest.mark.skipif(compiled is None, reason="there is no compiled data plane here")
BOTH = [
    pytest.param(reference, id="reference"),
    pytest.param(compiled, id="compiled", marks=NEEDS_COMPILED),
]
