"""What each adapter tells tests/integrations/test_key_sources.py about its key spaces.

An adapter's module, such as tests/integrations/sglang/key_sources.py, has a `NAME` (its column in
docs/key-sources.md), `SOURCES` (for each row of that page, pairs of engines that differ in this source
only) and `keys`, which describes an engine and returns the ids of its key spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PAGE = Path(__file__).parents[2] / "docs" / "key-sources.md"
NOT_IN_THE_KEY = "not in the key"
"""How the cell of a source begins that an adapter has no variants of."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two engines that differ in one source."""

    other: Mapping[str, Any]
    """Facts of the second engine, as arguments of `keys`."""
    one: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts of the first engine. Without any, it is the engine that `keys` describes by default."""
    pools: Sequence[str] = ()
    """The pools whose bytes depend on the source. Empty: all pools."""
    refused: str = ""
    """A pattern of the error, if the second engine is refused."""


class AdapterKeys(Protocol):
    """The module of an adapter."""

    @property
    def NAME(self) -> str: ...  # noqa: N802 - a constant of a module
    @property
    def SOURCES(self) -> Mapping[str, Sequence[Pair]]: ...  # noqa: N802
    @property
    def keys(self) -> Callable[..., Mapping[str, str]]:
        """A function of a directory for the engine's files, a `MonkeyPatch` and facts of the engine.

        It returns the id of the key space of each pool.
        """
        ...


def table() -> list[dict[str, str]]:
    """Return the rows of the page's table, by the names of its columns."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    head, _, *rows = (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    )
    return [dict(zip(head, row, strict=True)) for row in rows]
