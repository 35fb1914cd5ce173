"""Messages about `capacity_nbytes` that all backends share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.scalars import format_exact_nbytes

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace


def page_over_capacity(
    backend: str, space: KeySpace, page_nbytes: int, capacity_nbytes: int
) -> str:
    """Return the message for a key space with pages that are larger than the whole capacity."""
    return (
        f"{backend}: capacity_nbytes is {format_exact_nbytes(capacity_nbytes)}, but one page of pool"
        f" {space.pool!r} of {space.model!r} takes {format_exact_nbytes(page_nbytes)}: raise"
        " capacity_nbytes, or use a smaller page size"
    )
