"""Replaces what needs a GPU, so that SGLang's wheel runs on any machine. Import it before SGLang.

1. Two operator schemas of torchvision are defined, because its kernels link CUDA.
2. SGLang's own stub (`_platform_stubs.py`) replaces triton, which is not installed.
3. Host pools are not pinned.
4. Torch index copies replace five CUDA kernels of `sgl_kernel` that copy between device and host.
   So these tests run SGLang's own code only between L2 and L3.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from typing import Any

torch: Any = importlib.import_module("torch")
HOST_POOLS = "sglang.srt.mem_cache.pool_host"


def stand_in() -> None:
    """Install all replacements. A second call does nothing."""
    if "sglang" not in sys.modules:
        make_importable()
        replace_copies()


def make_importable() -> None:
    """Install the first two replacements, before anything imports SGLang."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
    if importlib.util.find_spec("triton") is None:
        _stub_triton()


def replace_copies() -> None:
    """Install the other two replacements."""
    _leave_unpinned()
    for name, copies in REPLACED.items():
        module: Any = importlib.import_module(f"{HOST_POOLS}.{name}")
        for operator, copy in copies.items():
            setattr(module, operator, copy)


_LIBRARIES: list[Any] = []


def _stub_triton() -> None:
    path = importlib.metadata.distribution("sglang").locate_file("sglang/_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", str(path))
    assert spec is not None
    assert spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules["_sglang_platform_stubs"] = stubs
    spec.loader.exec_module(stubs)
    stubs._patch_non_blocking = lambda: None
    metal: Any = torch.mps
    names = dir(metal)
    before = (sys.platform, platform.machine, torch.backends.mps.is_available)
    modules: Any = (sys, platform, torch.backends.mps)
    try:  # the stub installs itself only on a Mac
        modules[0].platform, modules[1].machine, modules[2].is_available = (
            "darwin",
            lambda: "arm64",
            lambda: True,
        )
        stubs.install_platform_stubs()
    finally:
        modules[0].platform, modules[1].machine, modules[2].is_available = before
        for name in set(dir(metal)).difference(names):
            delattr(metal, name)


def _leave_unpinned() -> None:
    base: Any = importlib.import_module(f"{HOST_POOLS}.base")
    original = base.HostKVCache.__init__

    def unpinned(self: Any, *arguments: Any, **options: Any) -> None:
        options["pin_memory"] = False
        original(self, *arguments, **options)

    base.HostKVCache.__init__ = unpinned
    # SGLang's 10 GiB are too much where many servers share one machine.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def _copy(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_out(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    pages, offsets = dst_indices // page_size, dst_indices % page_size
    for plane, target in enumerate(dst_ptrs):
        for layer in range(layers):
            target[pages, layer, offsets] = src_ptrs[plane * layers + layer][src_indices]


def _copy_in(  # noqa: PLR0917 - the kernel's signature
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    pages, offsets = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, offsets]


def _copy_out_of_pointers(
    *,
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    tokens = int(src_indices.max()) + 1
    for addresses, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        rows = target.view(len(target), num_layers, -1).view(torch.uint8)
        for layer, address in enumerate(addresses.tolist()):
            memory = (ctypes.c_uint8 * (tokens * item_size)).from_address(address)
            source = torch.frombuffer(memory, dtype=torch.uint8).view(tokens, item_size)
            rows[dst_indices, layer] = source[src_indices]


def _copy_in_by_tokens(
    *,
    src_k: Any,
    dst_k: Any,
    src_v: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[src_indices, layer_id].view(-1, *target.shape[1:])


_DIRECT: dict[str, Any] = {
    "transfer_kv_direct": _copy,
    "transfer_kv_all_layer_direct_lf_pf": _copy_out,
    "transfer_kv_per_layer_direct_pf_lf": _copy_in,
}
_KERNEL: dict[str, Any] = {
    "transfer_kv_all_layer_lf_pf": _copy_out_of_pointers,
    "transfer_kv_per_layer_pf_lf": _copy_in_by_tokens,
}
REPLACED: dict[str, dict[str, Any]] = {"mha": _DIRECT | _KERNEL, "mla": _DIRECT}
"""What replaces which operator, by the module of HOST_POOLS that calls it."""
