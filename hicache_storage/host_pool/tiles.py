"""Tiles: rectangles of a page, as segments of a host pool's memory in stored order.

A page of L layers and H heads can be cut into tiles, which the storage stores as pages of their own.
Then engines that split the model differently still find the parts that they need. A tile has the bytes
of its layers and heads, K before V, in the layout's order of axes. The bytes depend on the layout and on
the tile alone. Adjacent bytes form one segment:

    layout             cut by heads              cut by layers
    layer_first        one a token and layer     one a layer
    page_first         one a token and layer     one a token
    page_first_direct  one a token and layer     one
    page_head          one                       one a token and head

The table counts the segments of one plane, for the layers and heads of the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.host_pool.shape import LAYOUTS, POOL_AXES, array_shape, check_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.host_pool.shape import PageShape

MAX_SEGMENTS = 511
"""The most segments of a tile. With a header that is 512, which every storage accepts (KV-008)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of a page. Layers and heads count from the first ones of the page."""

    layers: tuple[int, int]
    """Range [start, end)."""
    heads: tuple[int, int] | None = None
    """Range [start, end); None: all heads of the page."""


class Run(NamedTuple):
    """A segment that every slot has: its start in slot 0, its size, and the distance between slots."""

    start: int
    nbytes: int
    stride: int


def whole_page(shape: PageShape) -> Tile:
    """Return the tile that covers the page."""
    return Tile((0, shape.layers))


def tile_nbytes(shape: PageShape, tile: Tile) -> int:
    """Return the size of one tile in bytes."""
    layers, heads = _extent(shape, tile)
    unit = shape.page_tokens * len(layers) * len(heads) * shape.itemsize
    return sum(unit * dim for _, dim in shape.planes)


def tile_runs(layout: str, shape: PageShape, slots: int, tile: Tile) -> list[Run]:
    """Return the segments of `tile` in a pool of `slots` pages, in stored order."""
    layers, heads = _extent(shape, tile)
    runs: list[Run] = []
    start = 0
    for plane, nbytes in enumerate(shape.plane_nbytes):
        dim = range(shape.planes[plane][1])
        wanted = {"l": layers, "h": heads, "t": range(shape.page_tokens), "d": dim}
        strides, slot_stride = _strides(layout, shape, plane, slots)
        offsets, length = _blocks([(wanted[axis], step) for axis, step in strides], shape.itemsize)
        runs += [Run(start + offset, length, slot_stride) for offset in offsets]
        start += slots * nbytes
    return runs


def check_tiles(layout: str, shape: PageShape, slots: int, tiles: Sequence[Tile]) -> None:
    """Raise ValueError for tiles that do not cover the page exactly once or have too many segments.

    Raises:
        ValueError: A tile is wrong. The message names the tile, and a layout that supports it.
    """
    cells: list[tuple[int, int]] = []
    for tile in tiles:
        layers, heads = _extent(shape, tile)
        cells += product(layers, heads)
    page = product(range(shape.layers), range(shape.planes[0][0]))
    if sorted(cells) != list(page):
        raise ValueError(
            f"tiles must cover each of {shape.layers} layers and {shape.planes[0][0]} heads once,"
            f" but these do not: {list(tiles)}"
        )
    for tile in tiles:
        segments = len(tile_runs(layout, shape, slots, tile))
        if segments > MAX_SEGMENTS:
            raise ValueError(
                f"layout {layout!r} makes {segments} segments of {tile}, but a storage takes at"
                f" most {MAX_SEGMENTS}: {_suggest_layouts(shape, slots, tiles)}"
            )


def _extent(shape: PageShape, tile: Tile) -> tuple[range, range]:
    """Return the layers and the heads of `tile`."""
    return range(*tile.layers), range(*(tile.heads or (0, shape.planes[0][0])))


def _strides(
    layout: str, shape: PageShape, plane: int, slots: int
) -> tuple[list[tuple[str, int]], int]:
    """Return the stride in bytes of each axis of a page, in stored order, and the slot stride."""
    step = shape.itemsize
    strides: list[tuple[str, int]] = []
    slot_stride = 0
    sizes = array_shape(layout, shape, plane, slots)
    for axis, size in zip(reversed(POOL_AXES[layout]), reversed(sizes), strict=True):
        if axis == "s":
            slot_stride = step
        elif axis == "n":  # the tokens of all slots in a row
            strides.append(("t", step))
            slot_stride = step * shape.page_tokens
        else:
            strides.append((axis, step))
        step *= size
    return strides[::-1], slot_stride


def _blocks(axes: list[tuple[range, int]], itemsize: int) -> tuple[list[int], int]:
    """Return the starts of the contiguous blocks in a part of an array, and the length of a block."""
    length = itemsize
    outer = list(axes)
    first = 0
    while outer and (len(outer[-1][0]) == 1 or outer[-1][1] == length):
        indices, step = outer.pop()
        first += indices.start * step
        length *= len(indices)
    steps = [[index * step for index in indices] for indices, step in outer]
    return [first + sum(offsets) for offsets in product(*steps)], length


def _suggest_layouts(shape: PageShape, slots: int, tiles: Sequence[Tile]) -> str:
    """Return a phrase that names the supported layouts, fewest segments first."""
    counts: dict[str, int] = {}
    for layout in LAYOUTS:
        try:
            check_layout(layout, shape)
        except ValueError:
            continue
        counts[layout] = max(len(tile_runs(layout, shape, slots, tile)) for tile in tiles)
    fit = [name for name in sorted(counts, key=counts.__getitem__) if counts[name] <= MAX_SEGMENTS]
    if not fit:
        return (
            "use layout 'page_head' and split heads only, or another layout and split layers only"
        )
    return "use layout " + " or ".join(f"{name!r} ({counts[name]})" for name in fit)
