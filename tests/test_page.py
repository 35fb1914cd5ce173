from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from pages import page

from hicache_storage.page import Page, address_of

DATA = bytes(range(48))


def as_memoryview_slice(data: bytes) -> Any:
    return memoryview(bytearray(b"before" + data + b"after"))[6 : 6 + len(data)]


def as_mmap(data: bytes) -> Any:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def as_array(data: bytes) -> Any:
    return array.array("I", data)


def as_ctypes(data: bytes) -> Any:
    return (ctypes.c_ubyte * len(data)).from_buffer_copy(data)


def as_wide_memoryview(data: bytes) -> Any:
    return memoryview(bytearray(data)).cast("I", (3, 4))


def as_numpy(dtype: str, shape: tuple[int, ...]) -> Callable[[bytes], Any]:
    return lambda data: np.frombuffer(bytearray(data), dtype).reshape(shape)


def as_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Callable[[bytes], Any]:
    def made(data: bytes) -> Any:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape).clone()

    return made


def bytes_in(buffer: Any) -> bytes:
    """Return the bytes of a buffer, as its own library converts them."""
    if isinstance(buffer, torch.Tensor):
        return buffer.view(torch.uint8).numpy().tobytes()
    return buffer.tobytes() if isinstance(buffer, np.ndarray) else bytes(memoryview(buffer))


def as_read_only_numpy(data: bytes) -> Any:
    return np.frombuffer(data, "<u2")


WRITABLE: Mapping[str, Callable[[bytes], Any]] = {
    "bytearray": bytearray,
    "memoryview slice": as_memoryview_slice,
    "memoryview of words": as_wide_memoryview,
    "mmap": as_mmap,
    "array": as_array,
    "ctypes": as_ctypes,
    "numpy bytes": as_numpy("u1", (48,)),
    "numpy matrix": as_numpy("<f4", (3, 4)),
    "numpy 4-d": as_numpy("<u2", (2, 3, 1, 4)),
    "numpy datetime": as_numpy("<M8[s]", (6,)),  # a dtype without a buffer format
    "tensor of bytes": as_tensor(torch.uint8, (48,)),
    "tensor of bfloat16": as_tensor(torch.bfloat16, (2, 3, 4)),
    "tensor of float8": as_tensor(torch.float8_e4m3fn, (6, 8)),
    "tensor of float32": as_tensor(torch.float32, (3, 4)),
}
READ_ONLY: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "memoryview of bytes": memoryview,
    "read-only numpy": as_read_only_numpy,
}
EVERY = {**WRITABLE, **READ_ONLY}


def buffers(kinds: Mapping[str, Callable[[bytes], Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("made", kinds.values(), ids=kinds)


# --- segments ------------------------------------------------------------------------------------


@buffers(EVERY)
def test_a_segment_is_a_flat_view_of_the_bytes(made: Callable[[bytes], Any]) -> None:
    (segment,) = Page(made(DATA)).segments

    assert ("B", 1, True) == (segment.format, segment.ndim, segment.c_contiguous)
    assert DATA == segment.tobytes()


@buffers(WRITABLE)
def test_bytes_written_to_a_page_are_in_its_buffer(made: Callable[[bytes], Any]) -> None:
    buffer = made(bytes(48))
    Page(buffer).copy_from(DATA)

    assert DATA == bytes_in(buffer)


@buffers(EVERY)
def test_addresses_are_where_the_bytes_are(made: Callable[[bytes], Any]) -> None:
    borrowed = Page(made(DATA))
    ((address, nbytes),) = borrowed.addresses

    assert DATA == ctypes.string_at(address, nbytes)


@buffers(READ_ONLY)
def test_a_read_only_page_cannot_be_filled(made: Callable[[bytes], Any]) -> None:
    borrowed = Page(made(DATA))

    assert all(segment.readonly for segment in borrowed.segments)
    with pytest.raises(TypeError, match="read-only"):
        borrowed.copy_from(DATA)


def test_segments_keep_their_order_and_their_buffers() -> None:
    parts: list[Any] = [
        bytearray(b"one"),
        np.frombuffer(bytearray(b"two"), "u1"),
        memoryview(b"three"),
    ]
    borrowed = Page(*parts)

    assert [3, 3, 5] == [segment.nbytes for segment in borrowed.segments]
    assert 11 == borrowed.nbytes
    assert b"onetwothree" == borrowed.tobytes()
    assert [b"one", b"two", b"three"] == [ctypes.string_at(*run) for run in borrowed.addresses]


@pytest.mark.parametrize(
    "empty",
    [
        b"",
        bytearray(),
        np.empty((0, 4), "f4"),
        np.empty((3, 0), "f4"),
        torch.empty(0, dtype=torch.bfloat16),
        torch.empty((2, 0)),
    ],
    ids=repr,
)
def test_an_empty_buffer_is_no_segment(empty: Any) -> None:
    borrowed = Page(empty, b"x", empty)

    assert [b"x"] == [bytes(segment) for segment in borrowed.segments]
    assert 1 == len(borrowed.addresses)


def test_a_page_of_nothing_has_no_bytes() -> None:
    assert (0, (), (), b"") == (Page().nbytes, Page().segments, Page().addresses, Page().tobytes())


def test_a_tensor_that_requires_gradients_has_its_bytes() -> None:
    tensor = torch.ones(4, requires_grad=True)

    assert tensor.detach().numpy().tobytes() == Page(tensor).tobytes()


def test_a_part_of_a_tensor_is_that_part() -> None:
    tensor = torch.arange(32, dtype=torch.bfloat16).view(4, 8)
    borrowed = Page(tensor[1:3])

    assert tensor.data_ptr() + 16 == borrowed.addresses[0][0]
    assert tensor[1:3].clone().view(torch.uint8).numpy().tobytes() == borrowed.tobytes()


@pytest.mark.parametrize(
    "scattered",
    [
        memoryview(bytearray(16))[::2],
        memoryview(bytearray(16))[::-1],
        np.zeros((4, 4), "f4")[:, 1],
        np.zeros((4, 4), "f4").T,
        np.zeros(8, "<M8[s]")[::2],
        torch.zeros(4, 4)[:, 1],
        torch.zeros(4, 4, dtype=torch.bfloat16).t(),
    ],
    ids=lambda buffer: f"{type(buffer).__name__}",
)
def test_a_buffer_with_holes_is_refused(scattered: Any) -> None:
    with pytest.raises(ValueError, match="C-contiguous"):
        Page(scattered)


@pytest.mark.parametrize("thing", ["text", 5, None, [1, 2], object()], ids=type)
def test_an_object_that_is_no_buffer_is_refused_by_type(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a buffer, not {type(thing).__name__}"):
        Page(thing)


def test_a_tensor_that_is_not_in_host_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="this tensor is on meta"):
        Page(torch.empty(4, device="meta"))


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(48,), (1, 47), (16, 16, 16), (1,) * 48], ids=str)
def test_a_copy_spreads_over_the_segments(cuts: tuple[int, ...]) -> None:
    borrowed = Page(*map(bytearray, cuts))
    borrowed.copy_from(DATA)

    assert DATA == borrowed.tobytes()
    assert list(cuts) == [segment.nbytes for segment in borrowed.segments]


@buffers(EVERY)
def test_a_copy_takes_any_buffer(made: Callable[[bytes], Any]) -> None:
    borrowed = Page(bytearray(20), bytearray(28))
    borrowed.copy_from(made(DATA))

    assert DATA == borrowed.tobytes()


@pytest.mark.parametrize("nbytes", [0, 47, 49])
def test_a_copy_of_another_length_is_refused_and_writes_nothing(nbytes: int) -> None:
    borrowed = page(48)
    before = borrowed.tobytes()

    with pytest.raises(ValueError, match=f"48 bytes cannot take {nbytes} bytes"):
        borrowed.copy_from(bytes(nbytes))
    assert before == borrowed.tobytes()


def test_tobytes_is_a_copy() -> None:
    borrowed = Page(bytearray(DATA))
    copied = borrowed.tobytes()
    borrowed.copy_from(bytes(48))

    assert DATA == copied


def test_a_page_shows_its_size_and_not_its_bytes() -> None:
    assert "Page(5 bytes in 2 segments)" == repr(Page(b"abc", b"de"))


def test_the_address_of_a_slice_is_the_slices() -> None:
    whole = memoryview(bytearray(16))

    assert address_of(whole) + 5 == address_of(whole[5:])
    assert address_of(whole) + 5 == address_of(whole.toreadonly()[5:])
