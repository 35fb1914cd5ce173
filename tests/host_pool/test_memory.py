"""The memory of host pools: population, huge pages, limits and pinning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from host_pages import MHA, SLOTS, fill, flat_page

from hicache_storage.host_pool import HostPool, PageShape

# --- memory --------------------------------------------------------------------------------------


def resident_nbytes(address: int) -> int:
    """Return how many bytes of the mapping at `address` are resident, as the kernel counts them."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = start <= address < end
        elif found and first == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def free_huge_pages() -> int:
    """Return the number of free huge pages of 2 MiB: 0 if the kernel has no file about them."""
    counter = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(counter.read_text("ascii")) if counter.exists() else 0


def big_shape(nbytes: int) -> PageShape:
    return PageShape.mla(page_tokens=1, layers=1, kv_dim=nbytes, dtype="uint8")


@pytest.mark.parametrize("huge_pages", ["none", "transparent"])
def test_memory_is_page_aligned_zeroed_and_resident(
    huge_pages: Literal["none", "transparent"],
) -> None:
    nbytes = 4 << 20
    with HostPool(big_shape(nbytes), slots=2, huge_pages=huge_pages) as pool:
        address, _ = pool.page(0).addresses[0]

        assert 0 == address % 4096
        assert 2 * nbytes <= resident_nbytes(address)
        assert bytes(2 * nbytes) == pool.buffers[0].tobytes()


def test_huge_pages_that_are_not_reserved_give_a_clear_error() -> None:
    free = free_huge_pages()
    with pytest.raises(MemoryError, match=f"not have {free + 1} huge pages of 2MiB.*nr_hugepages"):
        HostPool(big_shape(2 << 20), slots=free + 1, huge_pages="2MiB")


def test_reserved_huge_pages_hold_pages() -> None:
    free = free_huge_pages()
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


def test_too_many_slots_are_refused_before_they_are_listed() -> None:
    """The list of so many free slots would not fit into memory."""
    with pytest.raises(MemoryError, match="does not fit"):
        HostPool(MHA, slots=1 << 45)


def test_a_limit_of_the_process_is_a_memory_error() -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert "no memory for 300 MiB" in done.stdout


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
def test_pin_false_disables_pinning() -> None:
    with HostPool(MHA, slots=SLOTS, pin=False) as pool:
        assert not pool.pinned


@pytest.mark.parametrize("pin", [None, False])
def test_a_pool_does_not_load_torch(pin: bool | None) -> None:  # noqa: FBT001
    program = f"""
import sys
from hicache_storage.host_pool import HostPool, PageShape
shape = PageShape.mla(page_tokens=1, layers=1, kv_dim=1, dtype="uint8")
with HostPool(shape, slots=1, pin={pin}) as pool:
    pool.tile_page(0)
loaded = {{"torch", "numpy", "pydantic"}} & set(sys.modules)
sys.exit(f"loaded {{loaded}}" if loaded else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
