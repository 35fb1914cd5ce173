"""Runs the kit on SGLang's file backend, as it is in its wheel: `make field-sglang-file`."""

from __future__ import annotations

from field.sglang.file import SGLangFile
from hicache_conformance import StorageConformance
from page_files import FileSubject


class TestSGLangFile(FileSubject, StorageConformance):
    """`HiCacheFile` with its defaults: without its evictor and its metadata cache."""

    storage_class = files = SGLangFile
    absent = SGLangFile.absent
