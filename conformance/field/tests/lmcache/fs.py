"""Runs the kit on the two file adapters in LMCache's wheel.

Run it with `make field-lmcache-fs` or `make field-lmcache-fs-native`.
"""

from __future__ import annotations

from field.lmcache.fs import LMCacheFs, LMCacheFsNative
from hicache_conformance import StorageConformance
from page_files import FileSubject


class TestLMCacheFs(FileSubject, StorageConformance):
    """`FSL2Adapter` with its defaults: no O_DIRECT, temporary files next to the others."""

    storage_class = files = LMCacheFs
    absent = LMCacheFs.absent


class TestLMCacheFsNative(FileSubject, StorageConformance):
    """`LMCacheFSClient` with its defaults: four threads, no O_DIRECT, no read-ahead."""

    storage_class = files = LMCacheFsNative
    absent = LMCacheFsNative.absent
