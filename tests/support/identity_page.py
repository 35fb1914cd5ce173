"""The pages docs/sglang-identity.md and docs/vllm-identity.md, generated from the adapters' tables.

make identity-page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage.integrations.sglang import _arguments
from hicache_storage.integrations.sglang import _variables as _sglang
from hicache_storage.integrations.vllm import _variables as _vllm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_storage.integrations._variables import VariableTable

_ORIGIN = ("`make identity-page` writes it, and tests compare it with the installed engine.", "")


def pages() -> dict[str, str]:
    """Return the pages by the names of their files."""
    return {"sglang-identity.md": _page(_sglang_lines()), "vllm-identity.md": _page(_vllm_lines())}


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def _sglang_lines() -> Iterator[str]:
    yield from (
        "# SGLang's server arguments, its environment, and the key space",
        "",
        "Search this page for an argument or a variable. Servers share pages only if all that enters",
        "the key space is equal ([the rules of sharing](sglang.md#sharing-of-pages)).",
        *_ORIGIN,
    )
    yield from _entering("Enters the key space", _arguments.classified())
    yield from ("## Refused", "")
    yield from (
        f"* `{name}`: {why}" for name, how, why in _arguments.classified() if how == "refused"
    )
    yield ""
    yield from _reasons("Cannot change KV bytes", _arguments.INERT.items())
    yield from _variables(_sglang.VARIABLES)


def _vllm_lines() -> Iterator[str]:
    yield from (
        "# vLLM's environment and the key space",
        "",
        "Search this page for a variable. Engines share pages only if all that enters the key space is",
        "equal. vLLM's configs enter as a whole ([the rules](vllm.md#sharing-of-pages)).",
        *_ORIGIN,
    )
    yield from _variables(_vllm.VARIABLES)


def _variables(table: VariableTable) -> Iterator[str]:
    yield from _entering("Variables that enter the key space", table.classified())
    yield from _reasons("Variables that cannot change KV bytes", table.inert.items())


def _entering(title: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a section with the names in each place of the key space."""
    places: dict[str, list[str]] = {}
    for name, how, where in sorted(rows):
        if how == "enters":
            places.setdefault(where, []).append(name)
    yield from (f"## {title}", "")
    for where, names in sorted(places.items()):
        yield from (f"**{where}.** {', '.join(f'`{name}`' for name in names)}.", "")


def _reasons(title: str, reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    for why, names in reasons:
        yield from (f"**{why}** {', '.join(f'`{name}`' for name in sorted(names.split()))}.", "")


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
