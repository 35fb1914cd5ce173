"""Time limits on a busy machine, which may make any call late once.

@tried_again_if_late
def test_a_store_that_hangs_is_a_miss_after_its_deadline() -> None:
    ...
    must_be_within(elapsed_s, 1.5)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
_TRIES = 3


class Late(AssertionError):
    """Something took longer than its limit."""


def must_be_within(elapsed_s: float | None, limit_s: float, *, least_s: float = 0.0) -> None:
    """Raise Late if it took `limit_s` or longer. Fail if it took no longer than `least_s`."""
    assert elapsed_s is not None
    assert elapsed_s > least_s
    if elapsed_s >= limit_s:
        raise Late(f"it took {elapsed_s:.2f} s, and the limit is {limit_s:g} s")


def tried_again_if_late(test: Callable[P, None]) -> Callable[P, None]:
    """Decorate a test that fails only if it is late three times in a row. Any other failure counts.

    The test has the same fixtures each time.
    """

    @functools.wraps(test)
    def trying(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(_TRIES - 1):
            try:
                return test(*args, **kwargs)
            except Late:
                continue
        return test(*args, **kwargs)

    return trying
