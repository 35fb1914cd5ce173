"""Escape texts that others chose, before they are printed on a terminal."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Return a text as one line. Escape each character that a terminal would act on.

    Whoever can write to a store chooses the names in it. Control characters could move the cursor or
    fill the clipboard, and a line break could fake a row of a table.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """Join a text of several lines to one line, and escape it."""
    return escaped(" ".join(text.split()))
