"""Runs the kit on the `fs` tier (in Python) from vLLM's wheel: `make field-vllm-fs`."""

from __future__ import annotations

from field.vllm.fs import VllmFs
from hicache_conformance import StorageConformance
from page_files import PaddedFileSubject


class TestVllmFs(PaddedFileSubject, StorageConformance):
    """`FileSystemTierManager` with its defaults: 16 threads that prefer loads, 16 that prefer stores."""

    storage_class = files = VllmFs
    absent = VllmFs.absent
    alignment = 4096
