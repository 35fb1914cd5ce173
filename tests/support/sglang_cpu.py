"""What stands in for a GPU so that SGLang's own wheel runs on any machine. Import before SGLang.

1. Two operator schemas of torchvision, whose kernels link CUDA. SGLang uses its image transforms only.
2. triton is not installed: SGLang's own stub for machines without it (`_platform_stubs.py`).
3. Host pools are not pinned.
4. Three copies between device and host, which are CUDA kernels of `sgl_kernel`, as torch index copies.
   What moves between L1 and L2 is therefore ours in these tests; between L2 and L3 it is SGLang's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from typing import Any

torch: Any = importlib.import_module("torch")


def stand_in() -> None:
    """Put all of it in place. Once a process; twice does nothing."""
    if "sglang" in sys.modules:
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)
    if importlib.util.find_spec("triton") is None:
        _stub_triton()
    _leave_unpinned()
    _replace_copies()


_KEPT: list[Any] = []


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
    here: Any = (sys, platform, torch.backends.mps)
    try:  # it only stubs triton where it believes to be on a Mac
        here[0].platform, here[1].machine, here[2].is_available = (
            "darwin",
            lambda: "arm64",
            lambda: True,
        )
        stubs.install_platform_stubs()
    finally:
        here[0].platform, here[1].machine, here[2].is_available = before
        for name in set(dir(metal)).difference(names):
            delattr(metal, name)


def _leave_unpinned() -> None:
    base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    original = base.HostKVCache.__init__

    def unpinned(self: Any, *arguments: Any, **options: Any) -> None:
        options["pin_memory"] = False
        original(self, *arguments, **options)

    base.HostKVCache.__init__ = unpinned


def _replace_copies() -> None:
    for name in ("mha", "mla"):
        module: Any = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_direct = _copy
        module.transfer_kv_all_layer_direct_lf_pf = _copy_out
        module.transfer_kv_per_layer_direct_pf_lf = _copy_in


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


def _copy_in(  # noqa: PLR0917 - the kernel's own
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
