"""Writes the files of a report. Each file is replaced as a whole, or stays as it was before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicache_conformance.report.badge import badge_json
from hicache_conformance.report.html import html_report
from hicache_conformance.report.junit import junit_xml
from hicache_conformance.report.record import Record
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_FORMS = {
    "result.json": Record.to_json,
    "junit.xml": junit_xml,
    "report.html": html_report,
    "badge.json": badge_json,
}


def write_report(record: Record, directory: Path) -> list[Path]:
    """Write every form of `record` into `directory`, and create it if it is missing.

    Raises:
        ConfigError: The directory can't be written.
    """
    texts = {name: form(record) for name, form in _FORMS.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_written(directory / name, text) for name, text in texts.items()]
    except OSError as error:
        raise ConfigError(
            f"the report can't be written to {directory}: {error.strerror}"
        ) from error


def _written(path: Path, text: str) -> Path:
    """Replace `path` in one step, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        return temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
