"""With `durability: power` the pages of `file` survive a power cut (KV-405)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.file import batch_writer
from hicache_backends.file.storage import FileStorage
from hicache_conformance import Scratch, SyncedFiles
from hicache_conformance.checks import all_checks
from hicache_conformance.run.outcomes import Outcome
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.run.subject import Subject

from hicache_storage.backend_support.filesystem import sync_directory

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_backends.file.settings import FileSettings

_SYNC = "sync_directory"


class PowerFile(FileStorage):
    """A `file` whose syncs are seen."""

    def __init__(self, settings: FileSettings) -> None:
        SyncedFiles(settings.path).watch()
        super().__init__(settings)


class NoSyncedNames(PowerFile):
    """A `file` that does not sync directories after a batch: `str` stands for the sync."""

    def __init__(self, settings: FileSettings) -> None:
        super().__init__(settings)
        setattr(batch_writer, _SYNC, str)


class Power(Subject):
    storage_class = PowerFile
    path: Path

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.path = scratch.path / "root"
        return {"path": str(self.path), "durability": "power"}

    def cut_power(self) -> None:
        SyncedFiles(self.path).restore()


class NoNames(Power):
    storage_class = NoSyncedNames


@pytest.mark.parametrize(("subject", "outcome"), [(Power, "passed"), (NoNames, "failed")])
def test_pages_survive_a_power_cut_if_names_are_synced(
    subject: type[Subject], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsync", "fdatasync"):  # the stores replace them in this process, too
        monkeypatch.setattr(os, name, getattr(os, name))
    monkeypatch.setattr(SyncedFiles, "watched", {})
    monkeypatch.setattr(batch_writer, _SYNC, sync_directory)
    (check,) = (one for one in all_checks() if one.rule.id == "KV-405")

    record = run_check(subject, check, RunOptions())

    assert Outcome(outcome) is record.outcome, record.message
