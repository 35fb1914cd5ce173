"""The data plane: functions that handle a whole batch in one call, without the interpreter lock.

Each function takes a batch and returns one verdict for each page. The compiled module releases the
interpreter lock once for the whole call. `reference` has the same functions in Python, with the same
verdicts, except for those of `transports`. Python uses the reference if the compiled module is missing,
if it was compiled from other C sources than those next to it, or if the environment has
`HICACHE_NATIVE=0`. `HICACHE_NATIVE=1` requires the compiled module. `implementation` says which one is
in use. If that is the reference, `reason` says why.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from hicache_storage.native import reference, transports
from hicache_storage.native._sources import checksum
from hicache_storage.native.reference import *  # noqa: F403 - all functions, with their types
from hicache_storage.native.transports import *  # noqa: F403 - as above

__all__: list[str] = ["implementation", "reason"]
__all__ += reference.__all__
__all__ += transports.__all__

logger: logging.Logger = logging.getLogger(__name__)


def _load() -> tuple[Any, str]:
    """Return the compiled module and "". If the reference is used, return None and the reason."""
    wanted = os.environ.get("HICACHE_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise ImportError(
            f"HICACHE_NATIVE is {wanted!r}: set it to 0 (Python) or 1 (compiled), or unset it"
        )
    if wanted == "0":
        return None, "HICACHE_NATIVE is 0"
    module, why_not = _compiled()
    if module is None and wanted:
        raise ImportError(f"HICACHE_NATIVE is 1, but {why_not}")
    return module, why_not


def _compiled() -> tuple[Any, str]:
    try:
        module = import_module("hicache_storage.native._native")
    except ImportError as error:
        return None, (
            f"there is no compiled module ({error}). Install a C compiler and Python's headers,"
            " and then this package again"
        )
    folder = Path(__file__).parent
    expected = checksum(folder)
    if expected in ("", getattr(module, "SOURCES", None)):
        return module, ""
    why_not = (
        "the compiled module does not match the C sources next to it. Rebuild it:"
        f" python {folder / '_build.py'}"
    )
    logger.warning("the data plane runs in Python: %s", why_not)
    return None, why_not


_loaded = _load()
_module = _loaded[0]
reason: str = _loaded[1]
"""Why the reference is used. Empty if the compiled module is used."""
implementation: str = "reference" if _module is None else "compiled"
if _module is not None:
    globals().update({name: getattr(_module, name) for name in __all__ if hasattr(_module, name)})
