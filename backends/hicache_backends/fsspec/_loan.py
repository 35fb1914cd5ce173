"""The caller's pages, for as long as its call runs and not a moment longer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

T = TypeVar("T")


class Loan:
    """Lets others touch the caller's pages until the call ends.

    Work that is late goes on after its caller has been answered: it must neither read nor write pages
    that are the caller's again. Whoever is touching one when the call ends is waited for, which is as
    long as a copy takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False

    def touch(self, action: Callable[[], T]) -> T:
        """What `action` gives, which copies out of a page or into one.

        Raises:
            TimeoutError: The call is over.
        """
        with self._lock:
            if self._over:
                raise TimeoutError("the call is over")
            return action()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over = True
