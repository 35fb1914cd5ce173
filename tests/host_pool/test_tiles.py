"""Tiles: parts of a page that are stored as pages of their own."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from hicache_storage.host_pool import LAYOUTS, HostPool, PageShape, Tile

SLOTS = 3
LAYERS, HEADS, TOKENS = 4, 6, 2
MHA = PageShape.mha(page_tokens=TOKENS, layers=LAYERS, heads=HEADS, head_dim=5, dtype="bfloat16")
MLA = PageShape.mla(page_tokens=TOKENS, layers=LAYERS, kv_dim=7, dtype="bfloat16")
UNEQUAL = PageShape.mha(
    page_tokens=TOKENS, layers=LAYERS, heads=HEADS, head_dim=5, v_head_dim=2, dtype="bfloat16"
)
BY_HEADS = [Tile((0, 4), (0, 2)), Tile((0, 4), (2, 6))]
BY_LAYERS = [Tile((0, 3)), Tile((3, 4))]
BY_BOTH = [Tile(layers, heads) for layers, heads in product([(0, 3), (3, 4)], [(0, 2), (2, 6)])]
CUTS = [
    *(
        pytest.param(MHA, layout, tiles, id=f"mha-{layout}-{name}")
        for layout in LAYOUTS
        for name, tiles in (("heads", BY_HEADS), ("layers", BY_LAYERS), ("both", BY_BOTH))
    ),
    *(
        pytest.param(MLA, layout, BY_LAYERS, id=f"mla-{layout}")
        for layout in LAYOUTS
        if layout != "page_head"
    ),
    pytest.param(UNEQUAL, "page_first", BY_BOTH, id="unequal-page_first"),
    pytest.param(UNEQUAL, "page_first_direct", BY_BOTH, id="unequal-page_first_direct"),
]

# The axes of a slot's part of a plane's array.
AXES = {
    "layer_first": "lthd",
    "page_first": "tlhd",
    "page_first_direct": "lthd",
    "page_head": "htld",
}


def cut(pool: HostPool, slot: int, tile: Tile) -> bytes:
    """Return the bytes of a tile, sliced by numpy from the engine's arrays."""
    parts: list[bytes] = []
    for array in pool.arrays():
        where: dict[str, tuple[Any, ...]] = {
            "layer_first": (slice(None), slice(slot * TOKENS, (slot + 1) * TOKENS)),
            "page_first": (slice(slot * TOKENS, (slot + 1) * TOKENS),),
            "page_first_direct": (slot,),
            "page_head": (slot,),
        }
        page = array[where[pool.layout]]
        at = {"l": slice(*tile.layers), "h": slice(*(tile.heads or (None, None)))}
        wanted = tuple(at.get(axis, slice(None)) for axis in AXES[pool.layout])
        parts.append(np.ascontiguousarray(page[wanted]).tobytes())
    return b"".join(parts)


def filled(shape: PageShape, layout: str, tiles: list[Tile]) -> HostPool:
    """Return a pool in which every number is unique."""
    pool = HostPool(shape, slots=SLOTS, layout=layout, tiles=tiles)
    start = 0
    for array in pool.arrays():
        array[...] = np.arange(start, start + array.size, dtype=np.uint16).reshape(array.shape)
        start += array.size
    return pool


@pytest.mark.parametrize(("shape", "layout", "tiles"), CUTS)
def test_a_tile_is_its_part_of_the_engines_array(
    shape: PageShape, layout: str, tiles: list[Tile]
) -> None:
    with filled(shape, layout, tiles) as pool:
        for slot, (number, tile) in product(range(SLOTS), enumerate(tiles)):
            payload = pool.tile_page(slot, number)

            assert cut(pool, slot, tile) == payload.tobytes()
            assert len(payload.tobytes()) == payload.nbytes


@pytest.mark.parametrize(("shape", "layout", "tiles"), CUTS)
def test_a_write_through_a_tile_changes_its_bytes_only(
    shape: PageShape, layout: str, tiles: list[Tile]
) -> None:
    with filled(shape, layout, tiles) as pool:
        before = [cut(pool, 1, tile) for tile in tiles]
        others = [pool.page(slot).tobytes() for slot in (0, 2)]
        payload = pool.tile_page(1, 1)
        payload.copy_from(bytes(payload.nbytes))

        assert bytes(payload.nbytes) == cut(pool, 1, tiles[1])
        for number, tile in enumerate(tiles):
            if number != 1:
                assert before[number] == cut(pool, 1, tile)
        assert others == [pool.page(slot).tobytes() for slot in (0, 2)]


@pytest.mark.parametrize(("shape", "layout", "tiles"), CUTS)
def test_a_tiles_bytes_depend_on_nothing_around_it(
    shape: PageShape, layout: str, tiles: list[Tile]
) -> None:
    tile = tiles[-1]
    heads = None if tile.heads is None else tile.heads[1] - tile.heads[0]
    layers = tile.layers[1] - tile.layers[0]
    planes = tuple((heads or whole, dim) for whole, dim in shape.planes)
    alone = PageShape(page_tokens=TOKENS, layers=layers, dtype=shape.dtype, planes=planes)
    with filled(shape, layout, tiles) as pool, HostPool(alone, slots=1, layout=layout) as small:
        stored = pool.tile_page(1, len(tiles) - 1)
        small.page(0).copy_from(stored.tobytes())

        assert cut(pool, 1, tile) == cut(small, 0, Tile((0, layers)))


@pytest.mark.parametrize(
    ("layout", "tiles", "segments"),
    [
        ("layer_first", BY_HEADS, 2 * TOKENS * LAYERS),
        ("layer_first", BY_LAYERS, 2 * 3),
        ("page_first", BY_HEADS, 2 * TOKENS * LAYERS),
        ("page_first", BY_LAYERS, 2 * TOKENS),
        ("page_first_direct", BY_HEADS, 2 * TOKENS * LAYERS),
        ("page_first_direct", BY_LAYERS, 2),
        ("page_head", BY_HEADS, 2),
        ("page_head", BY_LAYERS, 2 * TOKENS * HEADS),
    ],
)
def test_neighbours_in_memory_are_one_segment(
    layout: str, tiles: list[Tile], segments: int
) -> None:
    with filled(MHA, layout, tiles) as pool:
        assert segments == len(pool.tile_page(1, 0).segments)


def test_an_uncut_page_is_one_tile() -> None:
    with HostPool(MHA, slots=1) as pool:
        assert (Tile((0, LAYERS)),) == pool.tiles
        assert pool.page(0).addresses == pool.tile_page(0).addresses


def test_a_missing_tile_is_refused() -> None:
    with (
        filled(MHA, "page_head", BY_HEADS) as pool,
        pytest.raises(ValueError, match="there is no tile 2: pages are cut into 2"),
    ):
        pool.tile_page(0, 2)


@pytest.mark.parametrize(
    "tiles",
    [
        [Tile((0, 3))],
        [Tile((0, 4)), Tile((3, 4))],
        [Tile((0, 5))],
        [Tile((0, 4), (0, 3)), Tile((0, 4), (2, 6))],
    ],
    ids=["gap", "overlap", "too-many-layers", "overlapping-heads"],
)
def test_tiles_that_do_not_cover_the_page_once_are_refused(tiles: list[Tile]) -> None:
    with pytest.raises(ValueError, match="must cover each of 4 layers and 6 heads once"):
        HostPool(MHA, slots=1, tiles=tiles)


def test_a_tile_in_too_many_segments_is_refused_with_the_layout_to_choose() -> None:
    shape = PageShape.mha(page_tokens=64, layers=32, heads=8, head_dim=1, dtype="int8")
    tiles = [Tile((0, 32), (0, 4)), Tile((0, 32), (4, 8))]

    with pytest.raises(
        ValueError, match=r"'page_first' makes 4096 .* use layout 'page_head' \(2\)"
    ):
        HostPool(shape, slots=1, tiles=tiles)


def test_the_most_segments_that_a_storage_accepts_are_not_refused() -> None:
    shape = PageShape.mla(page_tokens=511, layers=2, kv_dim=1, dtype="int8")
    tiles = [Tile((0, 1)), Tile((1, 2))]

    with HostPool(shape, slots=1, tiles=tiles) as pool:
        assert 511 == len(pool.tile_page(0, 1).segments)


def test_a_cut_that_no_layout_supports_is_refused_with_a_suggestion() -> None:
    shape = PageShape.mha(page_tokens=64, layers=32, heads=16, head_dim=1, dtype="int8")
    tiles = [Tile(layers, heads) for layers in [(0, 16), (16, 32)] for heads in [(0, 8), (8, 16)]]

    with pytest.raises(ValueError, match="use layout 'page_head' and split heads only"):
        HostPool(shape, slots=1, tiles=tiles)
