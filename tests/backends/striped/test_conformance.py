"""The kit's verdict on `striped`."""

from __future__ import annotations

from typing import Any

from composed_stores import FileMembers, file_member
from hicache_backends.striped import StripedStorage
from hicache_conformance import Scratch


class TestFourFiles(FileMembers):
    """Four disks of one host."""

    storage_class = StripedStorage
    in_quick_runs = "kv_(00[237]|10[34]|20[15]|301|404|501)"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.roots = [scratch.path / name for name in "abcd"]
        return {"stripes": [file_member(root.name, root) for root in self.roots]}

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> dict[str, Any]:
        self.roots = [scratch.path / name for name in "ab"]
        share = capacity_nbytes // 2
        return {
            "stripes": [file_member(root.name, root, capacity_nbytes=share) for root in self.roots]
        }
