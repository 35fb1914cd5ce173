"""Fingerprints of LoRA adapters. vLLM's block hashes have only the name and the path of an adapter."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations._weights import weights_at

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("vllm.hicache_storage")

_TICK_NS = 100_000_000
"""More than what a file's time may be behind the clock."""
_TRUST = (
    'Set "revision" in kv_connector_extra_config if the weights under a path never change while an engine'
    " runs"
)


class Adapter:
    """One adapter of this engine.

    vLLM may have loaded it at any time since the engine started. So its files have to be older than the
    engine, or the operator has to promise with `revision` that files do not change under their path.
    """

    def __init__(self, path: str, engine_started_ns: int) -> None:
        self._path = path
        self._files: dict[str, tuple[int, ...]] = {}
        self._fingerprint = ""
        self._problem = ""
        try:
            if os.path.isdir(path):  # noqa: PTH112 - vLLM's own test
                self._files = dict(_files(path))
                self._fingerprint = weights_at(path)
        except OSError as error:
            self._problem = f"its files cannot be read: {error.strerror}"
        newest_ns = max((times[-1] for times in self._files.values()), default=0)
        self._is_older = newest_ns < engine_started_ns - _TICK_NS
        self._warned = False

    def label(self, *, trusted: bool) -> str | None:
        """Return the fingerprint, "" if `revision` stands for it, or None if nobody knows the weights.

        Args:
            trusted: Whether there is a `revision`.
        """
        if self._fingerprint and not self._problem and self._current() != self._files:
            self._problem = "its files have changed. Give other weights another path, or restart the engine"
        problem = self._problem
        if not problem and not trusted and not self._fingerprint:
            problem = f"there are no weights under this path. {_TRUST}"
        elif not problem and not trusted and not self._is_older:
            problem = f"its files are newer than the engine, which may have loaded others. {_TRUST}"
        if not problem:
            return self._fingerprint
        if not self._warned:
            self._warned = True
            logger.warning("no pages of the LoRA adapter at %s are stored: %s", self._path, problem)
        return None

    def _current(self) -> dict[str, tuple[int, ...]]:
        try:
            return dict(_files(self._path))
        except OSError:
            return {}


class Adapters:
    """The adapters that requests of this engine have named. Not thread-safe."""

    def __init__(self) -> None:
        self._started_ns = time.time_ns()
        self._known: dict[str, Adapter] = {}

    def of(self, request: Any) -> Adapter | None:
        """Return the adapter of a request, if it has one. Read the adapter's files at its first request."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        path = str(lora.lora_path)
        if path not in self._known:
            self._known[path] = Adapter(path, self._started_ns)
        return self._known[path]


def _files(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the files of a directory, and the links on the way to it, with inode, size and times."""
    place = Path(path).absolute()
    for link in (place, *place.parents):
        if link.is_symlink():
            yield str(link), _status(link.lstat())
    for entry in os.scandir(place):
        if entry.is_file():
            yield entry.name, _status(entry.stat())


def _status(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
