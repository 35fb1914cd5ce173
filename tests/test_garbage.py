"""What a collection of garbage looks at in a process that runs tests."""

from __future__ import annotations

import gc


def test_it_passes_over_what_was_there_before_the_first_test() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
