"""What stands in for a GPU is what `device.py` says. If an update of SGLang changes that, this fails."""

from __future__ import annotations

import re
import warnings
from importlib import metadata
from pathlib import Path

import sglang_cpu

sglang_cpu.make_importable()

_IMPORTED = re.compile(r"from sgl_kernel\.kvcacheio import \((.*?)\)", re.DOTALL)
_OVERRIDDEN = 9


def test_the_copies_are_operators_that_sglang_imports() -> None:
    for name, copies in sglang_cpu.REPLACED.items():
        module = f"{sglang_cpu.HOST_POOLS}.{name}".replace(".", "/")
        source = Path(str(metadata.distribution("sglang").locate_file(f"{module}.py"))).read_text()
        imported = _IMPORTED.search(source)
        assert imported is not None
        assert {*copies} <= {*re.findall(r"\w+", imported[1])}


def test_the_platform_answers_what_sglang_asks() -> None:
    """Each member that it overrides is one of SGLang's, so SGLang still asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of SGLang's imports
        from serving.sglang.device import Device, NativeCpu

    bases: tuple[type, ...] = NativeCpu.__mro__
    known = {name for base in bases if base is not Device for name in vars(base)}
    overridden = {name for name in vars(Device) if not name.startswith("__")}
    assert overridden <= known
    assert len(overridden) == _OVERRIDDEN
