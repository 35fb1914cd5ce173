"""Decide which environment variables of an engine the bytes of its KV depend on."""

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
    """The environment variables that an engine registers, and others that its KV depends on.

    A test compares the table with the registry of the installed engine.
    """

    engine: str
    entering: Mapping[str, Any]
    """Variables whose value enters the key space, each with a neutral value that does not enter. If that
    is None, every value enters."""
    elsewhere: Mapping[str, str]
    """Variables whose effect another property of the key space covers, with the property's name."""
    inert: Mapping[str, str]
    """Variables that KV does not depend on, grouped by the reason."""

    def classified(self) -> Iterator[tuple[str, str, str]]:
        """Yield each variable, "enters" or "cannot" (affect KV), and where it enters or why not."""
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

    def facts(
        self, registry: Iterable[str], defaults: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the variables of this process that change the bytes of KV, with their values.

        A variable that is not set has its value of `defaults`, unless that is empty.

        A variable of the `registry` that is not classified is included if it is set, with a digest of
        its value, which may be a secret. For the path of a file, the value is a digest of the file's
        bytes.
        """
        known = {name: text for name, text in (defaults or {}).items() if text}
        values = {**known, **os.environ}
        found = {
            name: content_of(text)
            for name, neutral in self.entering.items()
            if (text := values.get(name)) is not None and _parsed(text, neutral) != neutral
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
    """Parse `text` as the type of `neutral`, or return `text` unchanged if that fails."""
    word = text.strip().lower()
    if isinstance(neutral, bool):
        return True if word in _TRUE else False if word in _FALSE else text
    if isinstance(neutral, (int, float)):
        try:
            return float(word)
        except ValueError:
            return text
    return text
