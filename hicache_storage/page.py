"""Pages: the bytes of one page of KV cache, in one or more pieces of host memory."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import torch
    from typing_extensions import Buffer

    HostBuffer: TypeAlias = "Buffer | np.ndarray[Any, Any] | torch.Tensor"
    """Contiguous host memory: memoryview, bytearray, numpy array, torch CPU tensor."""


class Revocable(Protocol):
    """Permission to access the memory of pages, until its owner revokes it. Thread-safe.

    An access copies one chunk, of about 256 KiB, to the page or from it. It makes no system call that
    waits for a device or a peer, so `revoke` returns quickly even if a call of the storage hangs. Any
    number of pages may share a revocable. Source: Linux, rust/kernel/revocable.rs.

        if not page.revocable.enter():
            return False  # the page is a miss
        try:
            segment[start:end] = chunk
        finally:
            page.revocable.leave()

    `hicache_storage.backend_support.revocable` has an implementation.
    """

    @property
    def state(self) -> bytearray:
        """The number of accesses and the revoked bit, as the data plane (`native`) reads them."""
        ...

    def enter(self) -> bool:
        """Begin an access and return True, or return False if the memory was revoked."""
        ...

    def leave(self) -> None:
        """End an access that `enter` began."""
        ...

    def revoke(self) -> None:
        """Refuse new accesses, and wait for those in progress to end. Idempotent."""
        ...


class Page:
    """One page in host memory: contiguous byte segments, in the order in which they are stored.

    A page borrows its memory and never copies it. Keep the buffers alive while you use the page, and do
    not change them during a storage call. Empty buffers are ignored.

    Raises:
        TypeError: A segment is not a buffer, or is not in host memory.
        ValueError: A buffer is not C-contiguous.

    Examples:
        >>> keys, values = bytearray(2), bytearray(2)
        >>> page = Page(keys, values)
        >>> page.copy_from(b"kkvv")
        >>> page.nbytes, bytes(values)
        (4, b'vv')
    """

    __slots__ = ("_addresses", "digest", "digest_skip", "given", "nbytes", "revocable", "segments")

    segments: tuple[memoryview, ...]
    nbytes: int
    digest_skip: int | None
    """The number of leading bytes that `digest` leaves out. None: no digest is needed."""
    digest: int | None
    """xxh3-64 of the page's bytes. You may set it if you hashed them while you filled the page.

    The page store then trusts it and does not hash the page again. So set it to None if you write to
    `segments` afterwards. `copy_from` clears it.
    """
    revocable: Revocable | None
    """Permission to access the page's memory, which its owner may revoke before the call ends.

    None: the storage may use the memory until the call ends. A storage that is not
    `Capabilities.revocable` ignores this permission.
    """

    given: bool
    """True if a storage may keep the memory of a page that it stores, instead of copying it.

    The page then has one segment. A storage that does not claim `Capabilities.keeps_given` ignores this.
    """

    def __init__(self, *segments: HostBuffer) -> None:
        views = [_bytes_of(segment) for segment in segments]
        self.segments = tuple(view for view in views if view.nbytes)
        self.nbytes = sum(view.nbytes for view in self.segments)
        self._addresses: tuple[tuple[int, int], ...] | None = None
        self.digest_skip = self.digest = None
        self.revocable = None
        self.given = False

    @classmethod
    def of_views(
        cls, views: tuple[memoryview, ...], nbytes: int, revocable: Revocable | None = None
    ) -> Page:
        """Make a page from flat, contiguous, non-empty byte views of `nbytes` in all. Check nothing."""
        page = cls.__new__(cls)
        page.segments = views
        page.nbytes = nbytes
        page._addresses = None  # noqa: SLF001 - a constructor
        page.digest_skip = page.digest = None
        page.revocable = revocable
        page.given = False
        return page

    @property
    def addresses(self) -> tuple[tuple[int, int], ...]:
        """(address, nbytes) of each segment, for RDMA and native I/O. Valid while the buffers exist."""
        if self._addresses is None:
            self._addresses = tuple((address_of(view), view.nbytes) for view in self.segments)
        return self._addresses

    def tobytes(self) -> bytes:
        """Return a copy of the whole page, for stores that take one blob."""
        return b"".join(self.segments)

    def copy_from(self, data: HostBuffer) -> None:
        """Fill the page from one buffer.

        Raises:
            ValueError: `data` and the page differ in length. The page is unchanged.
        """
        source = _bytes_of(data)
        if source.nbytes != self.nbytes:
            raise ValueError(f"a page of {self.nbytes} bytes cannot take {source.nbytes} bytes")
        self.digest = None
        start = 0
        for segment in self.segments:
            end = start + segment.nbytes
            segment[:] = source[start:end]
            start = end

    def __repr__(self) -> str:
        return f"Page({self.nbytes} bytes in {len(self.segments)} segments)"


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a non-empty contiguous view, writable or not."""
    if view.readonly:
        import numpy as np  # noqa: PLC0415 - only read-only pages need it

        return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _bytes_of(buffer: HostBuffer) -> memoryview:
    """Return a flat byte view of `buffer`, without copying it."""
    if (
        type(buffer) is memoryview
        and buffer.format == "B"
        and buffer.ndim == 1
        and buffer.c_contiguous
    ):
        return buffer
    try:
        view = memoryview(cast("Buffer", buffer))
    except (TypeError, ValueError, BufferError):
        view = memoryview(_array_bytes(buffer))
    if not view.c_contiguous:
        raise ValueError("a page segment must be C-contiguous; pass one segment per contiguous run")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _array_bytes(buffer: Any) -> Buffer:
    """Return the bytes of a tensor, or of an array whose dtype has no buffer format (ml_dtypes)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu":
            raise TypeError(f"a page must be in host memory, but this tensor is on {buffer.device}")
        if not buffer.is_contiguous():
            raise ValueError("a page segment must be C-contiguous, but this tensor is not")
        flat: Buffer = buffer.detach().flatten().view(torch.uint8).numpy()
        return flat
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(buffer, numpy.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("a page segment must be C-contiguous, but this array is not")
        array: Buffer = buffer.reshape(-1).view(numpy.uint8)
        return array
    raise TypeError(f"a page segment must be a buffer, not {type(buffer).__name__}")
