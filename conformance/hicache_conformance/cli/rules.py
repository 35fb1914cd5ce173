"""`hicache-conformance rules`: print the rules as on the docs page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

SUMMARY = "Print the rules in Markdown: docs/rules.md is this output."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flags: the verb has none."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - every verb has the same signature
    """Print the page and return 0."""
    from hicache_conformance.rules_page import rules_page  # noqa: PLC0415 - `--help` is quick

    sys.stdout.write(rules_page())
    return 0
