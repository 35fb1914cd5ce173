"""Copies between the KV cache and vLLM's CPU tier on a machine without a GPU: a plugin of vLLM.

vLLM 0.32 offloads KV only from CUDA, ROCm and XPU devices. On its CPU platform the "device" is memory of
the process, so a copy is a memmove. This module replaces what a stream, an event and a copy are, and the
two places that ask for a GPU; `REPLACED` lists them all. They lie in `vllm/v1/kv_offload/cpu`.

Everything that the tests are about is vLLM's own: the HTTP server, scheduler, model runner, attention,
sampling, offloading connector and worker, the tiering manager and its shared memory. Copies run in a
thread beside the model, in the order of their stream, as on a GPU. So vLLM's own fences are what keeps
them right: finished events, held blocks, flushed jobs.

vLLM loads the plugin in each of its processes by the entry point that `server.py` puts on their path. If
HICACHE_TEST_ZERO_DRAFT is set, loaded KV of a draft model is zeroed: the control of speculation.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

REPLACED = {
    "gpu_worker": {
        "current_platform": {"Stream", "current_stream", "stream"},
        "torch": {"Event"},
        "ops": {"swap_blocks_batch"},
    },
    "spec": {"current_platform": {"is_cuda_alike"}},
}
"""What is replaced: by module and global, its attributes. The tensors of the KV cache say `is_cuda`."""

ZERO_DRAFT = "HICACHE_TEST_ZERO_DRAFT"
_current = threading.local()
_draft_memory: list[range] = []


class Stream:
    """A queue of copies with a thread that makes them in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "device-copies")

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(work)

    def wait_stream(self, stream: None) -> None:
        """Do nothing: the model computes synchronously, so what it was given before is done."""

    def wait_event(self, event: Event) -> None:
        """Wait for the event as it is recorded now. vLLM records it again for a later copy."""
        self.submit(event.reached.result)


class Event:
    """The time at which a stream got as far as this."""

    def __init__(self, *, enable_timing: bool) -> None:
        self.reached: Future[float] = Future()

    def record(self, stream: Stream) -> None:
        self.reached = stream.submit(time.perf_counter)

    def query(self) -> bool:
        return self.reached.done()

    def synchronize(self) -> None:
        self.reached.result()

    def elapsed_time(self, end: Event) -> float:
        return (end.reached.result() - self.reached.result()) * 1e3


class _With:
    """An object with some attributes replaced."""

    def __init__(self, replaced: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced, name)


@contextmanager
def _stream(stream: Stream) -> Generator[None]:
    """Make it the stream that copies of this thread are submitted to."""
    _current.stream = stream
    yield
    _current.stream = None


def _swap_blocks_batch(
    source: Any, target: Any, nbytes: Any, *, is_src_access_order_any: bool
) -> None:
    """Copy between addresses. vLLM reuses the lists only after the copy, but they are small."""
    copies = list(zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True))

    def copy() -> None:
        for to, of, size in copies:
            ctypes.memmove(to, of, size)
            if any(to in memory for memory in _draft_memory):
                ctypes.memset(to, 0, size)

    _current.stream.submit(copy)


def register() -> None:
    """Replace it all. vLLM calls this, more than once in some processes."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    worker: Any = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    spec: Any = importlib.import_module("vllm.v1.kv_offload.cpu.spec")
    torch: Any = importlib.import_module("torch")
    if platform.device_type != "cpu" or isinstance(worker.torch, _With):
        return
    worker.current_platform = _With(
        platform, Stream=Stream, current_stream=lambda: None, stream=_stream
    )
    worker.torch = _With(torch, Event=Event)
    worker.ops = _With(worker.ops, swap_blocks_batch=_swap_blocks_batch)
    spec.current_platform = _With(platform, is_cuda_alike=lambda: True)
    device_tensor = type("DeviceTensor", (torch.Tensor,), {"is_cuda": True})
    handler = worker.SingleDirectionOffloadingHandler
    initialize = handler.__init__

    def with_device_tensors(self: Any, gpu_tensors: list[Any], **arguments: Any) -> None:
        tensors = [tensor.as_subclass(device_tensor) for tensor in gpu_tensors]
        initialize(self, gpu_tensors=tensors, **arguments)

    handler.__init__ = with_device_tensors
    if os.environ.get(ZERO_DRAFT):
        _note_draft_memory()


def _note_draft_memory() -> None:
    name = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"
    connector: Any = importlib.import_module(name).OffloadingConnectorWorker
    register_kv_caches = connector.register_kv_caches

    def noted(self: Any, kv_caches: dict[str, Any]) -> None:
        _draft_memory.extend(
            range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for layer, tensor in kv_caches.items()
            if "draft" in layer
        )
        register_kv_caches(self, kv_caches)

    connector.register_kv_caches = noted
