"""The config of `striped`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from hicache_storage.composition.settings import LimitSettings, Members
from hicache_storage.settings import Field, parse_nbytes


class StripedSettings(LimitSettings):
    """The config of `striped`."""

    stripes: Members
    """The stores, in any order. A page's place depends on their names and weights only."""
    weights: dict[str, float] = Field(default_factory=dict)
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
            wrong = next((name for name in {*self.weights} ^ {*names}), None)
            if wrong is not None:
                raise ValueError(
                    f"weights: give one weight to each stripe: {wrong!r} is not in both"
                )
            if min(self.weights.values()) <= 0:
                raise ValueError("weights: each must be above 0")
            return dict(self.weights)
        capacities = [stripe.config.get("capacity_nbytes") for stripe in self.stripes]
        if any(capacity is None for capacity in capacities):
            return dict.fromkeys(names, 1.0)
        return dict(zip(names, map(float, map(parse_nbytes, capacities)), strict=True))
