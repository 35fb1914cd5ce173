"""Pages of small host pools, with a unique number at each place."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_storage.host_pool import HostPool, PageShape

if TYPE_CHECKING:
    import numpy.typing as npt

SLOTS = 3
MHA = PageShape.mha(page_tokens=2, layers=3, heads=4, head_dim=5, dtype="bfloat16")
MLA = PageShape.mla(page_tokens=2, layers=3, kv_dim=7, dtype="bfloat16")
UNEQUAL = PageShape.mha(
    page_tokens=2, layers=3, heads=4, head_dim=5, v_head_dim=2, dtype="bfloat16"
)
# SGLang's page is the flattened part of the pool's array. Axes of one plane: s is the slot, t the
# token in the slot, n the token in the pool, l the layer, h the head, d the dim.
POOL_AXES = {
    "layer_first": "lnhd",
    "page_first": "nlhd",
    "page_first_direct": "slthd",
    "page_head": "shtld",
}
PAGE_AXES = {
    "layer_first": "lthd",
    "page_first": "tlhd",
    "page_first_direct": "lthd",
    "page_head": "htld",
}


def number_of(plane: int, at: dict[str, int]) -> int:
    """Return a 16-bit number that is unique to this place in these small pools."""
    index = plane
    for axis, size in (("s", SLOTS), ("t", 2), ("l", 3), ("h", 4), ("d", 7)):
        index = index * size + at[axis]
    return index


def places(shape: PageShape, plane: int, order: str, **fixed: int) -> itertools.product[Any]:
    """Return all indices of a plane. The last axis of `order` varies fastest."""
    heads, dim = shape.planes[plane]
    sizes = {"s": SLOTS, "t": shape.page_tokens, "l": shape.layers, "h": heads, "d": dim}
    return itertools.product(
        *([fixed[axis]] if axis in fixed else range(sizes[axis]) for axis in order)
    )


def fill(pool: HostPool) -> None:
    """Write `number_of` to each place of the layout's arrays."""
    for plane, array in enumerate(pool.arrays()):
        for place in places(pool.shape, plane, "stlhd"):
            at = dict(zip("stlhd", place, strict=True))
            axes = at | {"n": at["s"] * pool.shape.page_tokens + at["t"]}
            array[tuple(axes[axis] for axis in POOL_AXES[pool.layout])] = number_of(plane, at)


def flat_page(shape: PageShape, layout: str, slot: int) -> npt.NDArray[np.uint16]:
    """Return the page that SGLang would pass to a storage, number by number."""
    order = "s" + PAGE_AXES[layout]
    return np.array(
        [
            number_of(plane, dict(zip(order, place, strict=True)))
            for plane in range(len(shape.planes))
            for place in places(shape, plane, order, s=slot)
        ],
        dtype=np.uint16,
    )
