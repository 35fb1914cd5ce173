"""Read and write the pages of SGLang's host pools.

There are three implementations, because pools offer different kinds of access. All use the byte order
of SGLang's flat pages (`get_data_page`), so servers with and without `interface_v1` can read each
other's pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from hicache_storage.errors import ConfigError
from hicache_storage.host_pool.memory import map_memory
from hicache_storage.integrations.sglang._identity import is_logical
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_storage.integrations.sglang._engine import HostPool, Indices

# The attributes that may hold the memory of a host pool. Each pool has some of them.
_MEMORY_ATTRIBUTES = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "index_k_buffer",
    "index_k_scale_buffer",
    "index_k_with_scale_buffer",
)


class HostPages(Protocol):
    """Access to the pages of one host pool."""

    parts: int
    """The number of stored pages into which a page of the pool is split, by heads."""
    part_nbytes: int
    buffers: tuple[memoryview, ...]
    """All memory of the pages, for registration. Empty if pages are copied."""
    is_in_pool: bool
    """True if the pages lie in the pool itself, so that an index always refers to the same memory."""

    def sources(self, indices: Indices, count: int) -> list[list[Page]]:
        """Return `count` pages to save, as one list for each part."""
        ...

    def targets(self, indices: Indices, count: int) -> list[list[Page]]:
        """Return memory for `count` pages to load, as one list for each part."""
        ...

    def write_back(self, indices: Indices, pages: list[list[Page]], loaded: Sequence[bool]) -> None:
        """Copy the loaded pages into the pool, unless `targets` is the pool's own memory."""
        ...


def host_pages(name: str, pool: HostPool, parts: int) -> HostPages:
    """Return the fastest access to the pages of `pool`.

    Raises:
        ConfigError: The pool does not offer its pages to storages, or its memory cannot be located.
    """
    if is_logical(pool):
        return MarkerPages(pool)
    if getattr(pool, "kv_buffer", pool) is None or getattr(pool, "_is_dummy", False):
        raise ConfigError(f"sglang: the host pool of {name!r} has no memory on this rank")
    try:
        _addresses(pool, _first_page(pool), 1)
    except (NotImplementedError, ValueError) as error:
        return _flat_pages(name, pool, error)
    return SegmentPages(name, pool, parts)


class SegmentPages:
    """Pages in the pool's own memory, without copies."""

    is_in_pool = True

    def __init__(self, name: str, pool: HostPool, parts: int) -> None:
        self._name = name
        self._pool = pool
        self.parts = parts
        tensors = _memory(pool)
        self.buffers = tuple(Page(tensor).segments[0] for tensor in tensors)
        self._ranges = [
            (int(tensor.data_ptr()), memory)
            for tensor, memory in zip(tensors, self.buffers, strict=True)
        ]
        segments = self._segments(_first_page(pool), 1)
        self._per_page = len(segments)
        self._per_part = self._per_page // parts
        # SGLang alternates K and V of each layer. A flat page has all of K, then all of V.
        self._order = [
            sorted(range(start, start + self._per_part), key=lambda n: segments[n][:2])
            for start in range(0, self._per_page, self._per_part)
        ]
        sizes = {sum(segments[n][2] for n in order) for order in self._order}
        if len(sizes) != 1:
            raise ConfigError(
                f"sglang: pool {name!r} has parts of {sizes} bytes, but all must be equal"
            )
        self.part_nbytes = sizes.pop()

    def sources(self, indices: Indices, count: int) -> list[list[Page]]:
        segments = self._segments(indices, count)
        if len(segments) != count * self._per_page:
            raise ValueError(
                f"pool {self._name!r} gave {len(segments)} segments for {count} pages of"
                f" {self._per_page}"
            )
        starts = range(0, len(segments), self._per_page)
        return [
            [
                Page.of_views(
                    tuple(self._view(segments[start + n]) for n in order), self.part_nbytes
                )
                for start in starts
            ]
            for order in self._order
        ]

    targets = sources

    def write_back(self, indices: Indices, pages: list[list[Page]], loaded: Sequence[bool]) -> None:
        """Do nothing, because the pages are already in the pool."""

    def _segments(self, indices: Indices, count: int) -> list[tuple[int, int, int]]:
        """Return (buffer number, offset, nbytes) of each segment, in SGLang's order."""
        addresses = _addresses(self._pool, indices, self.parts)
        if not addresses or len(addresses) % count:
            raise ValueError(
                f"pool {self._name!r} gave {len(addresses)} segments for {count} pages"
            )
        return [self._locate(address, nbytes) for address, nbytes in addresses]

    def _locate(self, address: int, nbytes: int) -> tuple[int, int, int]:
        for number, (base, memory) in enumerate(self._ranges):
            offset = address - base
            if 0 <= offset <= memory.nbytes - nbytes:
                return number, offset, nbytes
        raise ConfigError(
            f"sglang: pool {self._name!r} ({type(self._pool).__name__}) has a page outside of its"
            " known memory: this version of SGLang is not supported for it"
        )

    def _view(self, segment: tuple[int, int, int]) -> memoryview:
        number, offset, nbytes = segment
        return self._ranges[number][1][offset : offset + nbytes]


class FlatPages:
    """Pages that the pool offers only as copies.

    These are layer-first index keys, and states that have a side state.
    """

    is_in_pool = False

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.parts = 1
        self.part_nbytes = _tensor_bytes(pool.get_dummy_flat_data_page()).nbytes
        self.buffers: tuple[memoryview, ...] = ()

    def sources(self, indices: Indices, count: int) -> list[list[Page]]:
        pages = [
            Page(_tensor_bytes(self._pool.get_data_page(start, flat=True)))
            for start in self._starts(indices, count)
        ]
        return [pages]

    def targets(self, indices: Indices, count: int) -> list[list[Page]]:  # noqa: ARG002 - part of the protocol
        return [[Page(_tensor_bytes(self._pool.get_dummy_flat_data_page())) for _ in range(count)]]

    def write_back(self, indices: Indices, pages: list[list[Page]], loaded: Sequence[bool]) -> None:
        for start, page, is_loaded in zip(
            self._starts(indices, len(loaded)), pages[0], loaded, strict=True
        ):
            if is_loaded:
                data = _as_tensor(page.segments[0]).view(_flat_dtype(self._pool))
                self._pool.set_from_flat_data_page(start, data)

    def _starts(self, indices: Indices, count: int) -> list[int]:
        return indices.tolist()[:: len(indices) // count]


class MarkerPages:
    """Marker bytes for a logical anchor, whose pages have no bytes of their own.

    SGLang writes the anchor after the side pools. So if a marker is stored, the side pools of its page
    are stored, too.
    """

    parts = 1
    part_nbytes = 1
    is_in_pool = True

    def __init__(self, pool: HostPool) -> None:
        self._page_tokens = pool.page_size
        self._markers = map_memory(max(1, pool.size // pool.page_size), "none")
        self.buffers: tuple[memoryview, ...] = (self._markers,)

    def sources(self, indices: Indices, count: int) -> list[list[Page]]:
        starts = indices.tolist()[:: len(indices) // count]
        slots = [start // self._page_tokens for start in starts]
        return [[Page.of_views((self._markers[slot : slot + 1],), 1) for slot in slots]]

    targets = sources

    def write_back(self, indices: Indices, pages: list[list[Page]], loaded: Sequence[bool]) -> None:
        """Do nothing, because the pages have no content."""


def flat_parts(flat: memoryview, parts: int) -> list[Page]:
    """Split a flat page into parts by heads. Each part has K, then V, of its heads (`page_head`)."""
    if parts == 1:
        return [Page(flat)]
    half = flat.nbytes // 2
    size = half // parts
    return [
        Page(
            flat[part * size : (part + 1) * size],
            flat[half + part * size : half + (part + 1) * size],
        )
        for part in range(parts)
    ]


def _flat_pages(name: str, pool: HostPool, reason: Exception) -> FlatPages:
    try:
        pages = FlatPages(pool)
        pages.sources(_first_page(pool), 1)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"sglang: pool {name!r} ({type(pool).__name__}, layout {pool.layout!r}) gives no pages to"
            f" storages: {reason}; {error}"
        ) from error
    return pages


def _addresses(pool: HostPool, indices: Indices, parts: int) -> list[tuple[int, int]]:
    foreign: Any = pool
    meta = (
        foreign.get_split_heads_page_buffer_meta(indices, parts)
        if parts > 1
        else pool.get_page_buffer_meta(indices)
    )
    return list(zip(*meta, strict=True)) if meta else []


def _first_page(pool: HostPool) -> Indices:
    import torch  # noqa: PLC0415 - SGLang has loaded it

    return cast("Indices", torch.arange(pool.page_size, dtype=torch.int64))


def _memory(pool: HostPool) -> list[Any]:
    """Return the pool's contiguous tensors that no other tensor contains, in a fixed order."""
    tensors: list[Any] = []
    for name in _MEMORY_ATTRIBUTES:
        tensors += [tensor for tensor in _as_iterable(getattr(pool, name, None)) if tensor.numel()]
    outer: list[Any] = []
    for tensor in tensors:
        if tensor.is_contiguous() and not any(_contains(other, tensor) for other in outer):
            outer.append(tensor)
    return outer


def _as_iterable(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return cast("Iterable[Any]", value) if isinstance(value, (list, tuple)) else (value,)


def _contains(outer: Any, inner: Any) -> bool:
    start, end = outer.data_ptr(), outer.data_ptr() + outer.nbytes
    return bool(start <= inner.data_ptr() and inner.data_ptr() + inner.nbytes <= end)


def _tensor_bytes(tensor: Any) -> memoryview:
    return Page(tensor.contiguous()).segments[0]


def _as_tensor(memory: memoryview) -> Any:
    import torch  # noqa: PLC0415

    return torch.frombuffer(memory, dtype=torch.uint8)


def _flat_dtype(pool: HostPool) -> Any:
    return pool.get_dummy_flat_data_page().dtype
