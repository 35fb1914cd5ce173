"""Starts `sglang.launch_server`: `python -m serving.sglang.launch --model-path ...`.

Each process of SGLang imports this module before anything of SGLang, because it is their main module. So
each of them has the stubs of what the wheel lacks without CUDA.
"""

from __future__ import annotations

import runpy

import sglang_cpu

sglang_cpu.make_importable()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
