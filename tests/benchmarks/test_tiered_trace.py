"""A short run of the table of tiers: a composition hits what its large store alone would."""

from __future__ import annotations

import pytest
from tiered_trace import row

_FLAGS = ["--conversations", "10", "--host-size", str(20 * 2048)]


@pytest.mark.slow
def test_a_composition_hits_as_much_as_its_large_store() -> None:
    alone, both = (row(name, 50, _FLAGS) for name in ("s3", "tiered back always"))

    assert alone.hits == both.hits > 0
    assert alone.large_written == both.large_written > 50
    assert both.fast_hits > 0
    assert both.large_hits > 0
    assert both.fast_written >= both.large_written
    assert 0 == both.not_copied
