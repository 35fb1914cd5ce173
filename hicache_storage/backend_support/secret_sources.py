"""Secrets that a config names and does not hold: in files and environment variables."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
"""Matches a name that is no secret, so that messages may show it."""


def read_secret_file(field: str, path: str) -> str:
    """Return the text of a file without white space around it.

    Raises:
        ValueError: The file cannot be read, or is empty. The message names `field`, and never the
            text. A path without a separator may be the secret itself, and is not shown.
    """
    shown = repr(path) if os.sep in path else "the file (a name without a path is not shown)"
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it holds no text"
        raise ValueError(f"{field}: {shown} cannot be read: {reason}") from None
    if not secret:
        raise ValueError(f"{field}: {shown} is empty")
    return secret


def read_secret_variable(field: str, name: str) -> str:
    """Return the value of an environment variable.

    Raises:
        ValueError: There is no such variable, or it is empty. The message names `field`. A name that
            may be the secret itself is not shown.
    """
    shown = repr(name) if _VARIABLE.fullmatch(name) else "of the name that is given"
    if not os.environ.get(name):
        raise ValueError(f"{field}: there is no environment variable {shown}, or it is empty")
    return os.environ[name]
