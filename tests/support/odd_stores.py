"""Stores that harm the process that judges them. They are opened with `dynamic`."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage

from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page


class Crashing(MemoryStorage):
    """A store that kills the interpreter at the first miss."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        found = super().batch_get(space, hashes, pages)
        if not all(found):
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class Exiting(MemoryStorage):
    """A store that exits the process without cleanup when a page is deleted."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        os._exit(7)


class Undeleting(MemoryStorage):
    """A store that was written for an interface without delete."""

    absent: ClassVar[dict[str, str]] = {"batch_delete": "it deletes no single page"}

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        raise UnsupportedOperation("no delete")


class Down(MemoryStorage):
    """A store whose server is not there."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        raise StorageUnavailable("127.0.0.1:1: connection refused, password was swordfish1")


class Deaf(MemoryStorage):
    """A store that returns True for a delete and keeps the page."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return [True] * len(hashes)


class Interrupted(FileStorage):
    """A store whose user presses Ctrl-C in the middle of each removal."""

    def remove_space(self, space_id: str) -> int:
        (space,) = (one for one in self.spaces() if one.id == space_id)
        hashes = [info.page_hash for info in self.scan(space)]
        super().batch_delete(space, hashes[: len(hashes) // 2])
        raise KeyboardInterrupt

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        super().batch_delete(space, hashes[:1])
        raise KeyboardInterrupt
