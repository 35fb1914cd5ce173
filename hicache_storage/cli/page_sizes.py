"""The size of the pages that a verb makes: the size for a known model, or one that the user gives."""

from __future__ import annotations

from typing import Any

from hicache_storage.replay.models import PRESETS

DEFAULT_PAGE_TOKENS = 64


def add_model_argument(parser: Any) -> None:
    """Add `--model` to a parser or a group. `model_page_nbytes` returns the size of its pages."""
    parser.add_argument(
        "--model",
        choices=PRESETS,
        default="llama-3.1-8b",
        help="the model whose page size to use (default: %(default)s)",
    )


def model_page_nbytes(model: str, page_tokens: int) -> int:
    """Return the size in bytes of a page of a known model, without its draft."""
    return PRESETS[model].target.page(page_tokens).nbytes
