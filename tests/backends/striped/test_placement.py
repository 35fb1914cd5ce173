from __future__ import annotations

from collections import Counter

import pytest
from hicache_backends.striped.placement import Placement
from pages import hash_of

HASHES = [hash_of(number) for number in range(20_000)]


def placed(**shares: float) -> list[str]:
    """Return the stripe of each page."""
    names, found = list(shares), [""] * len(HASHES)
    for index, positions in Placement(shares).split(HASHES).items():
        for position in positions:
            found[position] = names[index]
    return found


def test_the_order_of_the_stripes_does_not_matter() -> None:
    assert placed(a=1, b=2, c=3) == placed(c=3, a=1, b=2)


@pytest.mark.parametrize("shares", [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 5}])
def test_each_stripe_gets_its_share(shares: dict[str, float]) -> None:
    counts = Counter(placed(**shares))

    for name, share in shares.items():
        expected = share / sum(shares.values()) * len(HASHES)
        assert counts[name] == pytest.approx(expected, rel=0.05)


def test_a_stripe_that_is_added_moves_only_its_own_pages() -> None:
    before, after = placed(a=1, b=1, c=1), placed(a=1, b=1, c=1, d=1)

    assert {"d"} == {new for old, new in zip(before, after, strict=True) if old != new}


def test_a_place_never_changes() -> None:
    """Pages that another version wrote must be found."""
    assert "abbcbbcbbc" == "".join(placed(a=1, b=1, c=2)[:10])
