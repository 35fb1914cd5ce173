"""Keeps the progress of a storm in a file, so that a later run goes on from it."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(slots=True)
class Progress:
    """The figures and findings of one seed so far."""

    seed: int
    figures: Counter[str] = field(default_factory=Counter[str])
    findings: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    """How long all runs have taken."""
    path: Path | None = None
    """The file that `save` writes. None: the progress is not kept."""
    _saved_s: float = field(default_factory=time.monotonic)

    @classmethod
    def load(cls, path: Path, seed: int, *, fresh: bool = False) -> Self:
        """Read the progress with this seed. Begin anew if there is none, or if `fresh`."""
        kept: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            kept = json.loads(path.read_text())
        if fresh or kept.get("seed") != seed:
            return cls(seed, path=path)
        return cls(seed, Counter(kept["figures"]), kept["findings"], kept["seconds"], path)

    def save(self) -> None:
        """Write the file in one step."""
        now_s = time.monotonic()
        self.seconds += now_s - self._saved_s
        self._saved_s = now_s
        if self.path is None:
            return
        kept = {
            "seed": self.seed,
            "figures": self.figures,
            "findings": self.findings,
            "seconds": self.seconds,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(kept))
        new.replace(self.path)

    def report(self, name: str) -> str:
        """Return the seed, the figures and the findings as lines."""
        figures = json.dumps({**self.figures, "seconds": round(self.seconds)})
        return "\n  ".join([f"{name}, seed {self.seed}: {figures}", *self.findings])
