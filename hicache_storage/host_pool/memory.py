"""The memory of a host pool, which is mapped and populated once and, for CUDA, pinned once."""

from __future__ import annotations

import errno
import logging
import mmap
import sys
from typing import Any, Literal, get_args

from hicache_storage.errors import install_command
from hicache_storage.host_pool.memory_limits import available_memory
from hicache_storage.page import address_of
from hicache_storage.scalars import format_nbytes

logger: logging.Logger = logging.getLogger(__name__)

HugePages = Literal["none", "transparent", "2MiB", "1GiB"]

_HUGE_NBYTES: dict[str, int] = {"2MiB": 2 << 20, "1GiB": 1 << 30}
_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
_MADV_POPULATE_WRITE = 23
_POPULATE_NBYTES = 256 << 20


def map_memory(nbytes: int, huge_pages: HugePages) -> memoryview:
    """Map zeroed memory at a page boundary, with every page of it resident."""
    if huge_pages not in get_args(HugePages):
        choices = ", ".join(get_args(HugePages))
        raise ValueError(f"unknown huge_pages {huge_pages!r}; choose one of {choices}")
    if not nbytes:
        return memoryview(b"")
    memory = (
        _map_reserved(nbytes, huge_pages) if huge_pages in _HUGE_NBYTES else _map_ordinary(nbytes)
    )
    if huge_pages == "transparent":
        memory.madvise(mmap.MADV_HUGEPAGE)
    _populate(memory)
    return memoryview(memory)[:nbytes]


def _map_reserved(nbytes: int, huge_pages: HugePages) -> mmap.mmap:
    unit = _HUGE_NBYTES[huge_pages]
    count = -(-nbytes // unit)
    size = (unit.bit_length() - 1) << _MAP_HUGE_SHIFT
    try:
        return mmap.mmap(
            -1, count * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | size
        )
    except OSError as error:
        raise MemoryError(
            f"the kernel does not have {count} huge pages of {huge_pages} left"
            f" ({error.strerror}): reserve them in"
            f" /sys/kernel/mm/hugepages/hugepages-{unit >> 10}kB/nr_hugepages, or use"
            " huge_pages='transparent'"
        ) from error


def _map_ordinary(nbytes: int) -> mmap.mmap:
    _check_available(nbytes)
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a limit of the process, or a kernel that does not overcommit
        raise MemoryError(
            f"there is no memory for {format_nbytes(nbytes)}: {error.strerror}"
        ) from error


def _check_available(nbytes: int) -> None:
    """Raise MemoryError for a size that the kernel would answer by killing the process."""
    limit = available_memory()
    if nbytes > limit.nbytes:
        raise MemoryError(
            f"a host pool of {format_nbytes(nbytes)} does not fit: {format_nbytes(limit.nbytes)} are"
            f" available {limit.where}; use fewer slots, or a smaller --host-size of hicache replay"
        )


def _populate(memory: mmap.mmap) -> None:
    """Cause the page faults now, not in the first request, in steps that Ctrl-C can interrupt."""
    try:
        for start in range(0, len(memory), _POPULATE_NBYTES):
            nbytes = min(_POPULATE_NBYTES, len(memory) - start)
            memory.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.14 lacks it and populates later
            raise MemoryError(
                f"there is no memory for {format_nbytes(len(memory))}: {error.strerror}"
            ) from error


def load_torch() -> Any:
    """Import torch, or raise an ImportError with the command that installs it."""
    try:
        import torch  # noqa: PLC0415 - the import takes seconds
    except ImportError as error:
        raise ImportError(f"this needs torch: {install_command('torch')}", name="torch") from error
    return torch


def cuda_runtime(pin: bool | None) -> Any:  # noqa: FBT001 - three-valued, as in the constructor
    """Return torch's CUDA runtime if memory is to be pinned, else None."""
    torch = load_torch() if pin else sys.modules.get("torch")
    if pin is False or torch is None:
        return None
    if torch.cuda.is_available():
        return torch.cuda.cudart()
    if pin:
        raise RuntimeError("pin=True needs CUDA, but torch finds none: leave pin out")
    return None


def pin_memory(memory: memoryview, cuda: Any, *, required: bool) -> bool:
    """Lock `memory` for CUDA's copies, and return whether CUDA has done so.

    Raises:
        RuntimeError: CUDA refused, and pinning is `required`.
    """
    code = int(cuda.cudaHostRegister(address_of(memory), memory.nbytes, 0))
    if code and required:
        raise RuntimeError(
            f"CUDA could not pin {format_nbytes(memory.nbytes)}: cudaHostRegister returned {code}"
        )
    if code:
        logger.warning(
            "CUDA could not pin %s: cudaHostRegister returned %s",
            format_nbytes(memory.nbytes),
            code,
        )
    return not code


def unpin_memory(memory: memoryview, cuda: Any) -> None:
    """Undo `pin_memory`."""
    cuda.cudaHostUnregister(address_of(memory))
