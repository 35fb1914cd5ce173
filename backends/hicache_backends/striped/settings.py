"""The config of `striped`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from hicache_storage.composition.settings import LimitSettings, Members, Weight
from hicache_storage.errors import did_you_mean, shown
from hicache_storage.settings import Field, parse_nbytes


class StripedSettings(LimitSettings):
    """The config of `striped`."""

    stripes: Members
    """The stores, in any order. A page's place depends on their names and weights only."""
    weights: dict[str, Weight] = Field(default_factory=dict)
    """The share of pages that each stripe gets, by name. Without weights, each stripe's share is its
    `capacity_nbytes` if every stripe has one, and all shares are equal otherwise."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        self.shares()
        return self

    def shares(self) -> dict[str, float]:
        """Return the weight of each stripe, by name.

        Raises:
            ValueError: A weight is not above 0, or is that of no stripe, or a stripe has none.
        """
        names = [stripe.name for stripe in self.stripes]
        if self.weights:
            if missing := [name for name in names if name not in self.weights]:
                raise ValueError(f"weights: stripe {missing[0]!r} has none: give each one")
            if other := [name for name in self.weights if name not in names]:
                raise ValueError(
                    f"weights: there is no stripe {shown(other[0])!r}{did_you_mean(other[0], names)}"
                )
            if min(self.weights.values()) <= 0:
                raise ValueError("weights: each must be above 0")
            return dict(self.weights)
        capacities = [stripe.config.get("capacity_nbytes") for stripe in self.stripes]
        if any(capacity is None for capacity in capacities):
            return dict.fromkeys(names, 1.0)
        return dict(zip(names, map(_share, names, capacities), strict=True))


def _share(name: str, capacity: object) -> float:
    """Return a stripe's capacity as its share.

    Raises:
        ValueError: It is not a size above 0. The message names the stripe.
    """
    try:
        share = float(parse_nbytes(capacity))
    except ValueError as error:
        raise ValueError(f"stripes.{name}.config.capacity_nbytes: {error}") from None
    if share <= 0:
        raise ValueError(f"stripes.{name}.config.capacity_nbytes: must be above 0")
    return share
