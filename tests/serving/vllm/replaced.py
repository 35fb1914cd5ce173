"""What `device.py` puts in the place of a device does what vLLM expects of one."""

from __future__ import annotations

import threading

from serving.vllm.device import Event, Stream


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
