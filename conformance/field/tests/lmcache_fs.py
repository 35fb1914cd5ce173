"""The kit on LMCache's two file adapters, as in its wheel: `make field-lmcache-fs`, `-fs-native`."""

from __future__ import annotations

from field.lmcache_fs import LMCacheFs, LMCacheFsNative
from hicache_conformance import StorageConformance
from peer_files import InFiles


class TestLMCacheFs(InFiles, StorageConformance):
    """`FSL2Adapter` by its defaults: no O_DIRECT, temporary files beside the others."""

    storage_class = files = LMCacheFs
    absent = LMCacheFs.absent


class TestLMCacheFsNative(InFiles, StorageConformance):
    """`LMCacheFSClient` by its defaults: four threads, no O_DIRECT, no read-ahead."""

    storage_class = files = LMCacheFsNative
    absent = LMCacheFsNative.absent
