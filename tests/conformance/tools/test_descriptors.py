"""Waits for descriptors."""

from __future__ import annotations

import os
import resource

from hicache_conformance.tools.processes.descriptors import wait_readable, wait_writable

_HIGH = 1500
"""Above the most that `select.select` takes."""


def test_a_descriptor_of_any_number_can_be_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _HIGH + 2), hard))
    reader, writer = os.pipe()
    try:
        os.dup2(reader, _HIGH)
        os.dup2(writer, _HIGH + 1)
        assert not wait_readable(_HIGH, 0.0)
        assert wait_writable(_HIGH + 1, 0.0)
        os.write(writer, b"x")
        assert wait_readable(_HIGH, 0.0)
    finally:
        for descriptor in (reader, writer, _HIGH, _HIGH + 1):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
