"""One target under atheris, in a process of its own: `python -m fuzz.worker NAME -runs=1000`."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import Any

from fuzz.catalogue import Target

_PACKAGES = ["hicache_storage", "hicache_backends", "yaml", "tomllib", "email", "json"]
"""The packages whose branches guide the mutations."""


def main() -> None:
    """Run the target until libFuzzer ends the process."""
    atheris: Any = importlib.import_module("atheris")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=_PACKAGES):
        target = Target.load(name)
    atheris.Setup([name, *arguments], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
