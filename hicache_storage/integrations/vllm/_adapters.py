"""Fingerprints of LoRA adapters. vLLM's block hashes have only the name and the path of an adapter."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations._weights import change_since, weights_at

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("vllm.hicache_storage")

_TICK_S = 0.1
"""More than what the time of a file may be behind the clock."""
_TRUST = (
    'Set "revision" in kv_connector_extra_config if the weights under a path never change while an'
    " engine runs"
)


class Adapter:
    """One adapter of this engine.

    vLLM may have loaded it at any time since the engine started. So its files have to be older than the
    engine, or the operator promises with `revision` that the files under a path stay the same.
    """

    def __init__(self, path: str, engine_started_s: float) -> None:
        self._path = path
        self._files: list[tuple[object, ...]] = []
        self._fingerprint = self._doubt = self._problem = ""
        self._warned = False
        try:
            if os.path.isdir(path):  # noqa: PTH112 - `~` is not expanded
                self._files = sorted(_files(path))
                self._fingerprint = weights_at(path)
                self._doubt = change_since(engine_started_s - _TICK_S, path)
        except OSError as error:
            self._problem = f"its files cannot be read: {error.strerror}"

    def label(self, *, trusted: bool) -> str | None:
        """Return the fingerprint, "" if `revision` stands for it, or None if nobody knows the weights.

        Args:
            trusted: Whether there is a `revision`.
        """
        if self._fingerprint and not self._problem and self._have_changed():
            self._problem = (
                "its files have changed. Give other weights another path, or restart the engine"
            )
        problem = self._problem
        if not (problem or trusted or self._fingerprint):
            problem = f"there are no weights under this path. {_TRUST}"
        elif self._doubt and not (problem or trusted):
            problem = f"{self._doubt}, but vLLM may have loaded it before. {_TRUST}"
        if not problem:
            return self._fingerprint
        if not self._warned:
            self._warned = True
            logger.warning("no pages of the LoRA adapter at %s are stored: %s", self._path, problem)
        return None

    def _have_changed(self) -> bool:
        try:
            return sorted(_files(self._path)) != self._files
        except OSError:
            return True


class Adapters:
    """The adapters that requests of this engine have named. Not thread-safe."""

    def __init__(self) -> None:
        self._started_s = time.time()
        self._known: dict[str, Adapter] = {}

    def of(self, request: Any) -> Adapter | None:
        """Return the adapter of a request, if it has one. The first one reads the adapter's files."""
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        path = str(lora.lora_path)
        if path not in self._known:
            self._known[path] = Adapter(path, self._started_s)
        return self._known[path]


def _files(path: str) -> Iterator[tuple[object, ...]]:
    """Yield the name, inode, size and times of each file in a directory."""
    for entry in os.scandir(path):
        if entry.is_file():
            found = entry.stat()
            yield entry.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
