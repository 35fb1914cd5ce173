"""The targets: one module each in `targets/`, whose `check` raises for an input that it misjudges.

A module has `check(data)`, `SEEDS` (the inputs that fuzzing begins with), and may have `TOKENS`, pieces
that mutations insert. Its docstring states the property. Files in `corpus/NAME/` are further inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOM = Path(__file__).parent
NAMES = sorted(path.stem for path in (_ROOM / "targets").glob("*.py"))


@dataclass(frozen=True, slots=True)
class Target:
    """One parser and the property that it must have for every input."""

    name: str
    check: Callable[[bytes], None]
    """Raise for an input that is misjudged: AssertionError, or an exception that is not documented."""
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...]

    @classmethod
    def load(cls, name: str) -> Target:
        """Import the module of a target."""
        module: Any = importlib.import_module(f"fuzz.targets.{name}")
        tokens = tuple(getattr(module, "TOKENS", ()))
        return cls(name, module.check, tuple(module.SEEDS), tokens)

    def corpus(self) -> list[bytes]:
        """Return the inputs that fuzzing begins with."""
        kept = sorted((_ROOM / "corpus" / self.name).glob("*"))
        return [*self.seeds, *(path.read_bytes() for path in kept)]
