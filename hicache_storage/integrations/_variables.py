"""Environment variables of an engine: which ones the bytes of its KV depend on."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations._weights import content_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)

_TRUE = ("1", "true", "yes", "y")
_FALSE = ("0", "false", "no", "n")


@dataclass(frozen=True)
class VariableTable:
    """All variables of an engine's registry, and those outside of it that KV depends on.

    A test in the environment of each engine compares the table with that engine's own registry.
    """

    engine: str
    entering: Mapping[str, Any]
    """Variables that enter by their value, each with its neutral one. None: every value enters."""
    elsewhere: Mapping[str, str]
    """Variables whose effect another property of the key space shows, and the name of that property."""
    inert: Mapping[str, str]
    """Names of variables that KV does not depend on, by the reason."""

    def classified(self) -> Iterator[tuple[str, str, str]]:
        """Yield (variable, "enters" or "cannot", where or why) for every known variable."""
        for name, neutral in self.entering.items():
            unless = "" if neutral is None else f", unless that is `{neutral}`"
            unless = ", unless it is empty" if neutral == "" else unless
            yield name, "enters", f"`revision`, by its value{unless}"
        for name, where in self.elsewhere.items():
            yield name, "enters", where
        for why, names in self.inert.items():
            for name in names.split():
                yield name, "cannot", why

    @cached_property
    def known(self) -> frozenset[str]:
        """The names of all classified variables."""
        return frozenset(name for name, _, _ in self.classified())

    def facts(self, registry: Iterable[str]) -> dict[str, str]:
        """Return what this process's environment says about the bytes of KV, by variable.

        A variable of the `registry` that is not classified counts if it is set. Its value may be a
        secret, so a digest stands for it. The bytes of a file stand for its path.
        """
        found = {
            name: content_of(text)
            for name, neutral in self.entering.items()
            if (text := os.environ.get(name)) is not None and _parsed(text, neutral) != neutral
        }
        for name in sorted(set(registry).intersection(os.environ) - self.known):
            logger.warning(
                "this adapter has no entry for %s's environment variable %s: servers with another"
                " value share no pages with this one",
                self.engine,
                name,
            )
            found[name] = hashlib.sha256(os.environ[name].encode()).hexdigest()[:32]
        return found


def _parsed(text: str, neutral: object) -> object:
    """Return the value that `text` stands for, if it is one of the type of `neutral`."""
    word = text.strip().lower()
    if isinstance(neutral, bool):
        return True if word in _TRUE else False if word in _FALSE else text
    if isinstance(neutral, (int, float)):
        try:
            return float(word)
        except ValueError:
            return text
    return text
