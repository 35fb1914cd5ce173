"""Runs the kit on SGLang's NIXL backend over files, as it is in its wheel: `make field-sglang-nixl`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from field.sglang.nixl import SGLangNixl
from hicache_conformance import Scratch, StorageConformance

if TYPE_CHECKING:
    from hicache_storage import KeySpace


class TestSGLangNixl(StorageConformance):
    """`HiCacheNixl` with NIXL's POSIX plugin.

    O_DIRECT, its default, is off, because it takes only pages of whole blocks. Its cleaner is off,
    because it depends on the free disk space of the test machine.
    """

    storage_class = SGLangNixl
    absent = SGLangNixl.absent

    def config(self, scratch: Scratch) -> dict[str, Any]:
        own = {"use_direct_io": False, "l3_cleaner_enabled": False}
        plugin = {"plugin": {"posix": {"active": True}}}
        self.fields = {"path": str(scratch.path), "extra_config": own | plugin}
        return self.fields

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        with SGLangNixl.from_config(self.fields) as store:
            paths = [path for path, _ in store.paths_of(space, page_hash)]
        there = [path.read_bytes() for path in paths if path.is_file()]
        return b"".join(there) if there else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        """Replace each file with its part of `data`, and the last one with the rest."""
        with SGLangNixl.from_config(self.fields) as store:
            files = store.paths_of(space, page_hash)
        for path, nbytes in files:
            if data is None:
                path.unlink(missing_ok=True)
            else:
                size = nbytes if path != files[-1][0] else len(data)
                path.write_bytes(data[:size])
                data = data[size:]
