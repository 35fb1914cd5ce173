"""What a composition can claim, given what its stores claim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


STRONGEST = Capabilities(
    retention=Retention.UNTIL_DELETED,
    durability=Durability.POWER,
    shared=True,
    enumerable=True,
    bounded=True,
    revocable=True,
)
"""Every promise. It weakens no composition."""


def weakest(stores: Sequence[Capabilities]) -> Capabilities:
    """Return what holds for a page that any of `stores` may hold.

    Each promise is the weakest one, each limit the smallest, and `parallelism` the largest.
    """
    return Capabilities(
        retention=min(each.retention for each in stores),
        durability=min(each.durability for each in stores),
        shared=all(each.shared for each in stores),
        enumerable=all(each.enumerable for each in stores),
        overwrites=any(each.overwrites for each in stores),
        scatter_gather=all(each.scatter_gather for each in stores),
        alignment=max(each.alignment for each in stores),
        parallelism=max(each.parallelism for each in stores),
        max_batch=_smallest(each.max_batch for each in stores),
        max_page_nbytes=_smallest(each.max_page_nbytes for each in stores),
        max_batch_nbytes=_smallest(each.max_batch_nbytes for each in stores),
        bounded=all(each.bounded for each in stores),
        revocable=all(each.revocable for each in stores),
    )


def _smallest(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
