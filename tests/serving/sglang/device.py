"""The platform on which SGLang serves without a GPU, as a plug-in of SGLang.

SGLang's platform for CPUs needs Intel's kernels. An out-of-tree platform, which this is, runs each
operator's `forward_native` in torch. `sglang_cpu` also replaces the five CUDA operators that copy KV
between the device pool and the host pool, and leaves host pools unpinned.

Everything that the tests are about is SGLang's own: the HTTP server, the tokenizer's, scheduler's and
detokenizer's processes, the radix tree, the cache controller and its threads, the pools, attention, and
sampling. A copy happens at once in the scheduler's thread; on a GPU it would run in a stream.
`replaced.py` fails if an update of SGLang makes us replace more, or something else.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import sglang_cpu

_cpu: Any = importlib.import_module("sglang.srt.platforms.cpu")
_interface: Any = importlib.import_module("sglang.srt.platforms.interface")
_mixin: Any = importlib.import_module("sglang.srt.platforms.device_mixin")


class Device:
    """What this platform answers otherwise than SGLang's own for CPUs."""

    _enum = _mixin.PlatformEnum.OOT
    capabilities = _interface.PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend in {"torch_native", "triton"}

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Replace the copies. SGLang calls this once in each of its workers."""
        sglang_cpu.replace_copies()
        if os.environ.get("TRITON_INTERPRET") == "1":
            for name in ("spec_tree", "cache_locs"):  # their branches for XPU are plain Triton
                module: Any = importlib.import_module(f"sglang.kernels.ops.speculative.{name}")
                module._is_xpu = True


NativeCpu = type("NativeCpu", (Device, _cpu.CpuDeviceMixin, _interface.SRTPlatform), {})


def activate() -> str:
    """Return the name of the platform's class, as SGLang asks for it."""
    return f"{__name__}:NativeCpu"
