"""The page docs/sglang-identity.md, made of the adapter's table of SGLang's arguments.

make identity-page
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hicache_storage.integrations.sglang._arguments import INERT, classified

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMAND = "make identity-page"


def page() -> str:
    """Return docs/sglang-identity.md."""
    lines = [
        "# SGLang's server arguments and the key space",
        "",
        f"Written by `{_COMMAND}`. A test compares it with the `ServerArgs` of the installed SGLang.",
        "[sglang.md](sglang.md) has the rules of sharing.",
        "",
        *_table("Enters the key space", "where", "enters"),
        *_table("Refused", "when, and why", "refused"),
        "## Cannot change KV bytes",
        "",
    ]
    for why, names in INERT.items():
        listed = ", ".join(f"`{name}`" for name in sorted(names.split()))
        lines += [f"**{why}** {listed}.", ""]
    return "\n".join(lines[:-1]) + "\n"


def _table(title: str, second: str, wanted: str) -> Iterator[str]:
    yield from (f"## {title}", "", f"| argument | {second} |", "|---|---|")
    yield from (
        f"| `{name}` | {text} |" for name, how, text in sorted(classified()) if how == wanted
    )
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
