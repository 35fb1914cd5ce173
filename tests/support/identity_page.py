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

_COMMAND = "make identity-page"


def pages() -> dict[str, str]:
    """Return the pages by the names of their files."""
    return {"sglang-identity.md": _page(_sglang_lines()), "vllm-identity.md": _page(_vllm_lines())}


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def _sglang_lines() -> Iterator[str]:
    yield from (
        "# SGLang's server arguments, its environment, and the key space",
        "",
        f"Written by `{_COMMAND}`. Tests compare it with `ServerArgs` and `environ` of the installed",
        "SGLang.",
        "[sglang.md](sglang.md) has the rules of sharing.",
        "",
    )
    rows = list(_arguments.classified())
    yield from _table("Enters the key space", ("argument", "where"), rows, "enters")
    yield from _table("Refused", ("argument", "when, and why"), rows, "refused")
    yield from _reasons("Cannot change KV bytes", _arguments.INERT.items())
    yield from _variables(_sglang.VARIABLES)


def _vllm_lines() -> Iterator[str]:
    yield from (
        "# vLLM's environment and the key space",
        "",
        f"Written by `{_COMMAND}`. A test compares it with `vllm.envs` of the installed vLLM. Its",
        "configs enter as a whole, and [vllm.md](vllm.md#sharing-of-pages) has the rules of sharing.",
        "",
    )
    yield from _variables(_vllm.VARIABLES)


def _variables(table: VariableTable) -> Iterator[str]:
    rows = list(table.classified())
    yield from _table("Variables that enter the key space", ("variable", "where"), rows, "enters")
    yield from _reasons("Variables that cannot change KV bytes", table.inert.items())


def _table(
    title: str, columns: tuple[str, str], rows: Iterable[tuple[str, str, str]], wanted: str
) -> Iterator[str]:
    yield from (f"## {title}", "", f"| {' | '.join(columns)} |", "|---|---|")
    yield from (f"| `{name}` | {text} |" for name, how, text in sorted(rows) if how == wanted)
    yield ""


def _reasons(title: str, reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    for why, names in reasons:
        yield from (f"**{why}** {', '.join(f'`{name}`' for name in sorted(names.split()))}.", "")


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
