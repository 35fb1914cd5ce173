"""Which columns of tables wrap on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from hicache_storage.text_tables import fact_table, text_table


def _lines(table: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.strip() for line in captured.get().splitlines() if line.strip()]


def test_the_last_letter_is_that_of_all_further_columns() -> None:
    head, _, row = _lines(text_table(("a", "b", "c"), [("x", "1", "22")], "lr"), 40)

    assert ["a   b    c", "x   1   22"] == [head, row]


def test_a_narrow_terminal_wraps_what_may_be_wrapped() -> None:
    table = text_table(("id", "fact"), [("0123456789", "some words")], "lL")

    assert ["0123456789   some", "words"] == _lines(table, 20)[2:]


def test_a_fact_wraps_and_its_name_does_not() -> None:
    assert ["name  some", "words"] == _lines(fact_table([("name", "some words")]), 11)
