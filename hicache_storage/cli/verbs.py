"""The verbs of `hicache`, in the order of `--help`."""

from __future__ import annotations

from hicache_storage.cli import (
    backends,
    bench,
    copy,
    diff,
    doctor,
    explain,
    gc,
    inspect,
    ls,
    plan,
    replay,
    rm,
    stats,
    verify,
)
from hicache_storage.cli.program import Program

HICACHE = Program(
    name="hicache",
    description="KV-cache storage for LLM servers.",
    verbs=(
        backends,
        plan,
        replay,
        ls,
        stats,
        inspect,
        verify,
        rm,
        gc,
        copy,
        diff,
        bench,
        doctor,
        explain,
    ),
    has_log_flags=True,
)
