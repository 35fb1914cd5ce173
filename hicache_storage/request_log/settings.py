"""The fields for request logs in the settings of the engines' adapters."""

from __future__ import annotations

import os
from pathlib import Path

from hicache_storage.settings import ByteSize, Field, FileName, Settings


class ExplainLogSettings(Settings):
    """The explain log of an adapter."""

    explain_log: FileName = ""
    """The file of the explain log. `{pid}` in it stands for the process id. "" for no log."""
    log_file_nbytes: ByteSize = Field(default=64 << 20, ge=1 << 16)
    """The size at which a log file is rotated. One older file is kept."""


class TraceSettings(ExplainLogSettings):
    """The explain log of an adapter, and a trace of its requests."""

    trace: FileName = ""
    """The file of a trace for `hicache plan` and `hicache replay`. `{pid}` works, too. "" for none."""


def path_of(text: str) -> Path:
    """Return the path of this process's log file."""
    return Path(text.replace("{pid}", str(os.getpid())))
