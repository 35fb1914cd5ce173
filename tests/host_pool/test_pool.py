from __future__ import annotations

import collections
import ctypes
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from pages import hash_of, page, space

from hicache_storage.host_pool import LAYOUTS, HostPool, PageShape, Tile
from hicache_storage.host_pool import pool as pool_module
from hicache_storage.page_store.frame import Framing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

SLOTS = 3
MHA = PageShape.mha(page_tokens=2, layers=3, heads=4, head_dim=5, dtype="bfloat16")
MLA = PageShape.mla(page_tokens=2, layers=3, kv_dim=7, dtype="bfloat16")
UNEQUAL = PageShape.mha(
    page_tokens=2, layers=3, heads=4, head_dim=5, v_head_dim=2, dtype="bfloat16"
)
COMBINATIONS = [
    *(pytest.param(MHA, layout, id=f"mha-{layout}") for layout in LAYOUTS),
    *(pytest.param(MLA, layout, id=f"mla-{layout}") for layout in LAYOUTS if layout != "page_head"),
    pytest.param(UNEQUAL, "page_first", id="unequal-page_first"),
    pytest.param(UNEQUAL, "page_first_direct", id="unequal-page_first_direct"),
]

# SGLang's page is the flattened part of the pool's array. Axes of one plane: s is the slot, t the token
# in the slot, n the token in the pool, l the layer, h the head, d the dim.
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


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


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


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "layout"), COMBINATIONS)
def test_a_page_has_the_bytes_of_sglangs_flat_page(shape: PageShape, layout: str) -> None:
    with HostPool(shape, slots=SLOTS, layout=layout) as pool:
        fill(pool)

        for slot in range(SLOTS):
            assert flat_page(shape, layout, slot).tobytes() == pool.page(slot).tobytes()


@pytest.mark.parametrize(("shape", "layout"), COMBINATIONS)
def test_bytes_written_through_a_page_show_in_the_arrays(shape: PageShape, layout: str) -> None:
    with (
        HostPool(shape, slots=SLOTS, layout=layout) as pool,
        HostPool(shape, slots=SLOTS, layout=layout) as written,
    ):
        fill(pool)
        for slot in range(SLOTS):
            written.page(slot).copy_from(flat_page(shape, layout, slot))

        for expected, actual in zip(pool.arrays(), written.arrays(), strict=True):
            np.testing.assert_array_equal(expected, actual)


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
    with pytest.raises(ValueError, match="planes are K and V"):
        PageShape(page_tokens=1, layers=1, dtype="bfloat16", planes=planes)


@pytest.mark.parametrize(("slots", "frame_nbytes"), [(0, 128), (-1, 128), (1, -1)])
def test_a_pool_without_extent_is_refused(slots: int, frame_nbytes: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        HostPool(MHA, slots=slots, frame_nbytes=frame_nbytes)


# --- slots ---------------------------------------------------------------------------------------


def test_slots_are_given_first_in_first_out() -> None:
    with HostPool(MHA, slots=4) as pool:
        assert [0, 1, 2] == pool.allocate(3)
        pool.free([1, 0])

        assert [3, 1, 0] == pool.allocate(3)


def test_an_allocation_is_all_or_nothing() -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.allocate(2)

        assert pool.allocate(3) is None
        assert 2 == pool.free_slots
        assert [2, 3] == pool.allocate(2)


def test_an_allocation_of_nothing_succeeds_in_a_full_pool() -> None:
    with HostPool(MHA, slots=1) as pool:
        pool.allocate(1)

        assert [] == pool.allocate(0)


def test_a_negative_allocation_is_refused() -> None:
    with HostPool(MHA, slots=1) as pool, pytest.raises(ValueError, match="at least 0, not -1"):
        pool.allocate(-1)


@pytest.mark.parametrize(
    ("slots", "named"),
    [([0, 1, 0], 0), ([1, 2], 2), ([0, 3], 3), ([0, -1], -1), ([0, 4], 4)],
    ids=["twice in a call", "freed before", "never allocated", "negative", "out of range"],
)
def test_a_wrong_free_names_the_slot_and_frees_nothing(slots: list[int], named: int) -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.allocate(3)
        pool.free([2])

        with pytest.raises(ValueError, match=f"slot {named} is not in use"):
            pool.free(slots)
        assert 2 == pool.free_slots
        assert [3, 2] == pool.allocate(2)
        pool.free([0, 1, 2, 3])


def test_slots_may_be_numpy_integers() -> None:
    with HostPool(MHA, slots=4) as pool:
        pool.free(np.array(pool.allocate(4)))

        assert 4 == pool.free_slots


@pytest.mark.usefixtures("frequent_thread_switches")
def test_no_slot_is_given_to_two_threads() -> None:
    slots, threads, rounds = 16, 8, 3000
    held: collections.Counter[int] = collections.Counter()
    clashes: list[int] = []
    ready = threading.Barrier(threads)

    def work() -> None:
        ready.wait(timeout=10)
        for number in range(rounds):
            taken = pool.allocate(1 + number % 7)
            if taken is None:
                continue
            for slot in taken:
                held[slot] += 1
                if held[slot] != 1:
                    clashes.append(slot)
            for slot in taken:
                held[slot] -= 1
            pool.free(taken)

    with HostPool(MHA, slots=slots) as pool:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=30)

        assert [] == clashes
        assert slots == pool.free_slots
        everything = pool.allocate(slots)
        assert everything is not None
        assert list(range(slots)) == sorted(everything)


# --- headers -------------------------------------------------------------------------------------


def test_a_framed_page_has_its_own_header_and_the_slots_payload() -> None:
    with HostPool(MHA, slots=SLOTS, frame_nbytes=128) as pool:
        keyed = space(page_nbytes=MHA.nbytes, frame_nbytes=128)
        for slot in range(SLOTS):
            framed = pool.framed_page(slot)
            framed.payload.copy_from(page(MHA.nbytes, seed=slot).tobytes())
            Framing(keyed, checksum=True).write(framed, hash_of(slot))

        for slot in range(SLOTS):
            Framing(keyed, checksum=True).check(pool.framed_page(slot), hash_of(slot))
            assert page(MHA.nbytes, seed=slot).tobytes() == pool.page(slot).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_framed_page_is_made_once(layout: str) -> None:
    """A slot never moves, so its pages are cached. Each tile has a page of its own."""
    tiles = [Tile((0, 1)), Tile((1, MHA.layers))]
    with HostPool(MHA, slots=SLOTS, frame_nbytes=128, layout=layout, tiles=tiles) as pool:
        first = [pool.framed_page(slot, tile) for slot in range(SLOTS) for tile in range(2)]
        again = [pool.framed_page(slot, tile) for slot in range(SLOTS) for tile in range(2)]

        assert len({id(framed) for framed in first}) == 2 * SLOTS
        assert all(one is other for one, other in zip(first, again, strict=True))
        for slot, tile in [(0, 2), (0, -1), (1, -2), (-1, 1), (SLOTS, 0)]:
            with pytest.raises(ValueError, match="there is no"):
                pool.framed_page(slot, tile)


def test_no_more_views_are_kept_than_are_worth_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_CACHED_VIEWS", 2)
    with HostPool(MHA, slots=SLOTS, frame_nbytes=128) as pool:
        first = [pool.framed_page(slot) for slot in range(SLOTS)]
        again = [pool.framed_page(slot) for slot in range(SLOTS)]

        assert [n == 0 for n in range(SLOTS)] == [a is b for a, b in zip(first, again, strict=True)]
        assert [a.stored.addresses for a in first] == [b.stored.addresses for b in again]


def test_headers_are_as_aligned_as_their_size_allows() -> None:
    with HostPool(MHA, slots=SLOTS, frame_nbytes=4096) as pool:
        addresses = [pool.framed_page(slot).stored.addresses[0] for slot in range(SLOTS)]

        assert [(0, 4096)] * SLOTS == [(start % 4096, size) for start, size in addresses]


def test_a_pool_without_headers_frames_nothing() -> None:
    with HostPool(MHA, slots=1) as pool, pytest.raises(ValueError, match="no headers"):
        pool.framed_page(0)


def test_buffers_are_the_memory_of_pages_and_headers() -> None:
    with HostPool(MHA, slots=SLOTS, frame_nbytes=128) as pool:
        pages, headers = pool.buffers
        pool.framed_page(1).header[:] = b"h" * 128
        pool.page(1).copy_from(b"p" * MHA.nbytes)

        assert (SLOTS * MHA.nbytes, SLOTS * 128) == (pages.nbytes, headers.nbytes)
        assert b"\0" * 128 + b"h" * 128 + b"\0" * 128 == headers.tobytes()
        assert MHA.nbytes == pages.tobytes().count(b"p")


def test_a_pool_without_headers_has_one_buffer() -> None:
    with HostPool(MHA, slots=SLOTS) as pool:
        assert [SLOTS * MHA.nbytes] == [buffer.nbytes for buffer in pool.buffers]


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_page_of_no_slot_is_refused(slot: int) -> None:
    with HostPool(MHA, slots=SLOTS, frame_nbytes=128) as pool:
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            pool.page(slot)
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            pool.framed_page(slot)


# --- memory --------------------------------------------------------------------------------------


def resident_nbytes(address: int) -> int:
    """Return the resident bytes of the mapping at `address`, by the kernel's own count."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = start <= address < end
        elif found and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def big_shape(nbytes: int) -> PageShape:
    return PageShape.mla(page_tokens=1, layers=1, kv_dim=nbytes, dtype="uint8")


@pytest.mark.parametrize("huge_pages", ["none", "transparent"])
def test_memory_is_page_aligned_zeroed_and_there(
    huge_pages: Literal["none", "transparent"],
) -> None:
    nbytes = 4 << 20
    with HostPool(big_shape(nbytes), slots=2, huge_pages=huge_pages) as pool:
        address, _ = pool.page(0).addresses[0]

        assert 0 == address % 4096
        assert 2 * nbytes <= resident_nbytes(address)
        assert bytes(2 * nbytes) == pool.buffers[0].tobytes()


def test_huge_pages_that_are_not_reserved_give_a_clear_error() -> None:
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text("ascii"))
    with pytest.raises(MemoryError, match=f"no {free + 1} huge pages of 2MiB.*nr_hugepages"):
        HostPool(big_shape(2 << 20), slots=free + 1, huge_pages="2MiB")


def test_reserved_huge_pages_hold_pages() -> None:
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text("ascii"))
    if not free:
        pytest.skip("this kernel has no huge pages reserved")
    with HostPool(MHA, slots=SLOTS, huge_pages="2MiB") as pool:
        fill(pool)

        assert 0 == pool.page(0).addresses[0][0] % (2 << 20)
        assert flat_page(MHA, "page_first", 1).tobytes() == pool.page(1).tobytes()


def test_an_unknown_kind_of_huge_pages_lists_the_choices() -> None:
    wrong: Any = "4MiB"
    with pytest.raises(ValueError, match="'4MiB'; choose one of none, transparent, 2MiB, 1GiB"):
        HostPool(MHA, slots=1, huge_pages=wrong)


def test_a_pool_that_does_not_fit_is_refused_before_it_is_touched() -> None:
    with pytest.raises(MemoryError, match="does not fit"):
        HostPool(big_shape(1 << 40), slots=1 << 10)


def test_so_many_slots_are_refused_before_they_are_listed() -> None:
    """The list of free slots alone would not fit."""
    with pytest.raises(MemoryError, match="does not fit"):
        HostPool(MHA, slots=1 << 45)


def test_a_process_that_may_not_map_as_much_says_so() -> None:
    program = """
import resource
from hicache_storage.host_pool import HostPool, PageShape
shape = PageShape.mla(page_tokens=1, layers=1, kv_dim=1 << 20, dtype="uint8")
resource.setrlimit(resource.RLIMIT_AS, (256 << 20,) * 2)
try:
    HostPool(shape, slots=300)
except MemoryError as error:
    print(error)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert f"no memory for {300 << 20} bytes" in told.stdout


# --- the end -------------------------------------------------------------------------------------


def test_close_twice_is_fine() -> None:
    pool = HostPool(MHA, slots=1, frame_nbytes=128)
    pool.close()
    pool.close()


def test_a_closed_pool_gives_no_memory() -> None:
    pool = HostPool(MHA, slots=1, frame_nbytes=128)
    pool.close()

    for refused in (lambda: pool.page(0), lambda: pool.framed_page(0), pool.arrays, pool.tensors):
        with pytest.raises(ValueError, match="this host pool was closed"):
            refused()


def test_views_outlive_the_pool() -> None:
    """Views keep the memory alive. `close` does not fail and does not unmap it."""
    pool = HostPool(MHA, slots=SLOTS, frame_nbytes=128)
    fill(pool)
    borrowed, framed = pool.page(1), pool.framed_page(1)
    (keys, _), (tensor, _) = pool.arrays(), pool.tensors()
    pool.close()
    del pool
    gc.collect()

    assert flat_page(MHA, "page_first", 1).tobytes() == borrowed.tobytes()
    assert borrowed.tobytes() == framed.payload.tobytes()
    assert keys.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_memory_goes_with_the_last_view() -> None:
    pool = HostPool(MHA, slots=SLOTS, frame_nbytes=128)
    memory = weakref.ref(pool.buffers[0].obj)
    borrowed = pool.framed_page(0).payload
    pool.close()

    assert memory() is not None
    del borrowed
    assert memory() is None


# --- pinning -------------------------------------------------------------------------------------

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA")


@no_cuda
def test_pinning_without_cuda_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="pin=True needs CUDA"):
        HostPool(MHA, slots=1, pin=True)


@no_cuda
def test_a_pool_is_unpinned_where_there_is_no_cuda() -> None:
    with HostPool(MHA, slots=1) as pool:
        assert not pool.pinned


@cuda
@pytest.mark.parametrize("pin", [None, True])
def test_a_pool_is_pinned_until_it_is_closed(pin: bool | None) -> None:  # noqa: FBT001
    pool = HostPool(MHA, slots=SLOTS, pin=pin)
    tensor, _ = pool.tensors()

    assert pool.pinned
    assert tensor.is_pinned()
    pool.close()
    assert not pool.pinned
    assert not tensor.is_pinned()


@cuda
def test_a_pool_is_not_pinned_against_its_callers_word() -> None:
    with HostPool(MHA, slots=SLOTS, pin=False) as pool:
        assert not pool.pinned


@pytest.mark.parametrize("pin", [None, False])
def test_torch_is_not_loaded_to_find_out(pin: bool | None) -> None:  # noqa: FBT001
    program = f"""
import sys
from hicache_storage.host_pool import HostPool, PageShape
shape = PageShape.mla(page_tokens=1, layers=1, kv_dim=1, dtype="uint8")
with HostPool(shape, slots=1, frame_nbytes=128, pin={pin}) as pool:
    pool.framed_page(0)
loaded = {{"torch", "numpy", "pydantic"}} & set(sys.modules)
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
