"""Runs the kit's checks that delete pages on vLLM's `fs` tier, while the kit unlinks its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from field.vllm.fs import VllmFs
from hicache_conformance import StorageConformance
from page_files import PaddedFileSubject

if TYPE_CHECKING:
    from typing import Any

    from hicache_conformance import Scratch


class TestVllmFsUnlinking(PaddedFileSubject, StorageConformance):
    """`FileSystemTierManager` with its defaults, while an operator's clean-up runs."""

    storage_class = files = VllmFs
    absent = {name: text for name, text in VllmFs.absent.items() if name != "batch_delete"}  # noqa: RUF012 - of the base
    alignment = 4096

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.fields: dict[str, Any] = {**super().config(scratch), "unlinks": True}
        return self.fields
