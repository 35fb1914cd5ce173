"""Read secrets from the files and environment variables that a config names."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
"""Matches a name that cannot be a secret in hex or base32, because these have no underscore. Messages
may show such a name."""


def read_secret_file(field: str, path: str) -> str:
    """Return the text of a file, without the white space around it.

    Raises:
        ValueError: The file cannot be read, or is empty. The message names `field`, and never shows the
            text. If no file has this path, the path may be the secret itself and is not shown either.
    """
    directory = str(Path(path).parent)
    is_path = os.path.lexists(path) or (
        directory.strip("./") and os.path.isdir(directory)  # noqa: PTH112 - it takes any text
    )
    shown = (
        repr(path)
        if is_path
        else "the file (its path is not shown, because it names no existing directory)"
    )
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it does not hold text"
        raise ValueError(f"{field}: {shown} cannot be read: {reason}") from None
    if not secret:
        raise ValueError(f"{field}: {shown} is empty")
    return secret


def read_secret_variable(field: str, name: str) -> str:
    """Return the value of an environment variable.

    Raises:
        ValueError: The variable does not exist, or is empty. The message names `field`. A name that may
            be the secret itself is not shown.
    """
    is_name = name in os.environ or _VARIABLE.fullmatch(name)
    shown = repr(name) if is_name else "of the given name"
    if not os.environ.get(name):
        raise ValueError(f"{field}: there is no environment variable {shown}, or it is empty")
    return os.environ[name]
