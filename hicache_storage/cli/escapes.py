"""Texts that others wrote, as a terminal may get them."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return a text as one line, with each character escaped that a terminal obeys.

    Whoever can write to a store chooses the names in it: controls would move the cursor or fill the
    clipboard, and a line break would forge a row.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """Return a text of several lines as one, escaped."""
    return escaped(" ".join(text.split()))
