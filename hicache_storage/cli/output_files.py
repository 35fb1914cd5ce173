"""Files that a verb writes in addition to its output. They are checked before the work starts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping


def add_output_arguments(parser: argparse.ArgumentParser, *, html: bool = True) -> Any:
    """Add the flags for the files. Return the argument group, to which you may add more flags."""
    group = parser.add_argument_group("output")
    help_text = "also write the figures to a file"
    group.add_argument("--json", type=Path, metavar="FILE", help=help_text)
    if html:
        help_text = "also write an HTML page with plots to a file"
        group.add_argument("--html", type=Path, metavar="FILE", help=help_text)
    return group


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a file that cannot be written, before the work starts.

    Raises:
        ConfigError: A path is `-` or a directory, or its directory is missing or not writable.
    """
    for flag in ("json", "html"):
        path: Path | None = getattr(arguments, flag, None)
        if path is None:
            continue
        if str(path) == "-":
            raise ConfigError(f"--{flag} -: name a file, because the tables go to standard output")
        try:
            if path.is_dir():
                raise ConfigError(f"--{flag} {shown(path)}: is a directory, not a file")
            if not path.parent.is_dir():
                raise ConfigError(
                    f"--{flag} {shown(path)}: there is no directory {shown(path.parent)}"
                )
            file = path if path.exists() else path.parent
        except OSError as error:
            raise _unwritable(flag, path, error) from None
        if not os.access(file, os.W_OK):
            raise _unwritable(flag, path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def write_outputs(
    arguments: argparse.Namespace,
    report: Mapping[str, Any],
    html_page: Callable[[], str] | None = None,
) -> None:
    """Write the files that were asked for.

    Raises:
        ConfigError: A file cannot be written.
    """
    if arguments.json is not None:
        _write("json", arguments.json, json.dumps(report, indent=2) + "\n")
    if html_page is not None and arguments.html is not None:
        _write("html", arguments.html, html_page())


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(flag, path, error) from None


def _unwritable(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--{flag} {shown(path)}: cannot be written: {error.strerror}")
