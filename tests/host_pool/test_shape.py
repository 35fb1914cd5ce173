"""Shapes and layouts of pages: the order of bytes, and refused combinations."""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_pages import MHA, MLA, SLOTS, UNEQUAL, fill, flat_page

from hicache_storage.host_pool import LAYOUTS, HostPool, PageShape

COMBINATIONS = [
    *(pytest.param(MHA, layout, id=f"mha-{layout}") for layout in LAYOUTS),
    *(pytest.param(MLA, layout, id=f"mla-{layout}") for layout in LAYOUTS if layout != "page_head"),
    pytest.param(UNEQUAL, "page_first", id="unequal-page_first"),
    pytest.param(UNEQUAL, "page_first_direct", id="unequal-page_first_direct"),
]


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "layout"), COMBINATIONS)
def test_a_page_has_the_bytes_of_sglangs_flat_page(shape: PageShape, layout: str) -> None:
    with HostPool(shape, slots=SLOTS, layout=layout) as pool:
        fill(pool)

        for slot in range(SLOTS):
            assert flat_page(shape, layout, slot).tobytes() == pool.page(slot).tobytes()


@pytest.mark.parametrize(("shape", "layout"), COMBINATIONS)
def test_tensors_are_the_same_memory_in_the_real_dtype(shape: PageShape, layout: str) -> None:
    with HostPool(shape, slots=SLOTS, layout=layout) as pool:
        for tensor, array in zip(pool.tensors(), pool.arrays(), strict=True):
            tensor.copy_(torch.arange(tensor.numel(), dtype=torch.bfloat16).view(tensor.shape))

            assert torch.bfloat16 == tensor.dtype
            assert array.shape == tuple(tensor.shape)
            assert array.ctypes.data == tensor.data_ptr()
            assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_equal_planes_are_one_array_with_a_leading_two() -> None:
    with HostPool(MHA, slots=SLOTS) as pool:
        keys, values = pool.arrays()

        assert keys.ctypes.data + keys.nbytes == values.ctypes.data


@pytest.mark.parametrize(("shape", "layout"), COMBINATIONS)
def test_pages_share_no_byte_and_leave_none_out(shape: PageShape, layout: str) -> None:
    with HostPool(shape, slots=SLOTS, layout=layout) as pool:
        runs = sorted(run for slot in range(SLOTS) for run in pool.page(slot).addresses)
        first = runs[0][0]
        end = first
        for address, nbytes in runs:
            assert end == address
            end += nbytes

        assert SLOTS * shape.nbytes == end - first
        assert ctypes.addressof(ctypes.c_char.from_buffer(pool.buffers[0])) == first


@pytest.mark.parametrize(
    ("shape", "layout", "segments"),
    [
        (MHA, "layer_first", 6),
        (MHA, "page_first", 2),
        (MHA, "page_first_direct", 2),
        (MHA, "page_head", 2),
        (MLA, "layer_first", 3),
        (MLA, "page_first", 1),
        (MLA, "page_first_direct", 1),
    ],
)
def test_a_page_has_as_few_segments_as_its_layout_allows(
    shape: PageShape, layout: str, segments: int
) -> None:
    with HostPool(shape, slots=SLOTS, layout=layout) as pool:
        assert segments == len(pool.page(1).segments)


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e4m3fnuz", 1),
        ("float8_e5m2", 1),
        ("float8_e5m2fnuz", 1),
        ("int8", 1),
        ("uint8", 1),
    ],
)
def test_every_dtype_has_arrays_and_tensors_of_its_width(dtype: str, itemsize: int) -> None:
    shape = PageShape.mha(page_tokens=2, layers=1, heads=1, head_dim=8, dtype=dtype)
    with HostPool(shape, slots=1) as pool:
        pool.page(0).copy_from(bytes(range(shape.nbytes)))

        assert itemsize == shape.itemsize
        assert [itemsize] * 2 == [array.itemsize for array in pool.arrays()]
        assert [getattr(torch, dtype)] * 2 == [tensor.dtype for tensor in pool.tensors()]
        assert bytes(range(shape.nbytes)) == b"".join(array.tobytes() for array in pool.arrays())


# --- shapes that are refused ---------------------------------------------------------------------


def test_sizes_follow_the_shape() -> None:
    """MHA: P*L*H*(D+Dv)*itemsize; MLA: P*L*C*itemsize."""
    assert 2 * 3 * 4 * (5 + 5) * 2 == MHA.nbytes
    assert 2 * 3 * 4 * (5 + 2) * 2 == UNEQUAL.nbytes
    assert 2 * 3 * 7 * 2 == MLA.nbytes


def test_an_unknown_layout_lists_the_choices() -> None:
    with pytest.raises(
        ValueError, match=r"'page_last'.*layer_first, page_first, page_first_direct"
    ):
        HostPool(MHA, slots=1, layout="page_last")


def test_mla_has_no_page_head() -> None:
    with pytest.raises(ValueError, match="page_head"):
        HostPool(MLA, slots=1, layout="page_head")


@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_unequal_planes_need_a_page_first_layout(layout: str) -> None:
    with pytest.raises(ValueError, match="page_first or page_first_direct"):
        HostPool(UNEQUAL, slots=1, layout=layout)


def test_an_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"):
        PageShape.mla(page_tokens=1, layers=1, kv_dim=1, dtype="bfloat61")


@pytest.mark.parametrize("field", ["page_tokens", "layers", "heads", "head_dim", "v_head_dim"])
def test_a_shape_without_extent_is_refused(field: str) -> None:
    sizes: dict[str, int] = {"page_tokens": 1, "layers": 1, "heads": 1, "head_dim": 1} | {field: 0}
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        PageShape.mha(dtype="bfloat16", **sizes)


@pytest.mark.parametrize("planes", [(), ((2, 8),), ((2, 8), (3, 8)), ((1, 8),) * 3])
def test_planes_that_are_neither_k_and_v_nor_a_latent_are_refused(
    planes: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(ValueError, match="planes must be K and V"):
        PageShape(page_tokens=1, layers=1, dtype="bfloat16", planes=planes)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_pool_without_extent_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        HostPool(MHA, slots=slots)
