"""The tables of the truth matrix."""

from __future__ import annotations

from field.truth_matrix import PAGE, RECORDS, events, page, red_cells, rules
from hicache_conformance.report.summary import Summary

SERVING = """\
| file | restart | 8 | 8 | 9.00 | 0 |  |
<!-- events vLLM -->

vLLM 0.32.0:

| store | event | answers | wrong | slowest, s | cached tokens | what else |
| --- | --- | --- | --- | --- | --- | --- |
| file | restart | 8 | 0 | 2.60 | 4,608 | of 4,608 |
| vLLM's fs | a bit of every page is flipped | 1,008 | 1,007 and 1 failed | 0.27 | 4,608 |  |

<!-- end of events vLLM -->
<!-- demo vLLM -->

vLLM 0.32.0:

| phase | first token | of cold | from the cache | wrong answers |
| --- | --- | --- | --- | --- |
| fs (vLLM's), restarted | 0.44 s | 0.04 | 6,144 of 6,300 | 0 of 3 |

<!-- end of demo vLLM -->
<!-- demo vLLM linker -->

vLLM 0.32.0, ours as a linker:

| phase | first token | of cold | from the cache | wrong answers |
| --- | --- | --- | --- | --- |
| fs (vLLM's), restarted | 0.55 s | 0.05 | 6,144 of 6,300 | 0 of 3 |

<!-- end of demo vLLM linker -->
"""


def test_the_page_has_the_tables_of_its_records() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert page(text) == text, "run `make truth-matrix`"


def test_rules_that_no_store_was_asked_are_named_below_the_table() -> None:
    table, _, below = rules([Summary.read(path) for path in RECORDS.glob("*.json")]).rpartition(
        "\n\n"
    )

    assert "| KV-001 |" in table
    assert "KV-304" in below
    assert "KV-304" not in table


def test_each_broken_rule_has_a_cause() -> None:
    for path in RECORDS.glob("*.json"):
        record = Summary.read(path)
        section = red_cells({path.stem: record})
        by_programs = [line.rsplit("|", 3)[1] for line in section.splitlines() if ".py` |" in line]
        explained = f"{by_programs} {section.partition('by hand on')[2]}"
        for name in record.failed_checks:
            assert name.partition(":")[0] in explained, name


def test_events_of_the_engines_own_stores_come_first_and_wrong_answers_are_counted() -> None:
    own, ours = events(SERVING).splitlines()[2:]

    restart, damage = "0.44", "**1,008 of 1,008 wrong**, 0.27"
    assert f"| vLLM 0.32.0 | vLLM's fs | {restart} | {damage} |  |  |  |" == own
    assert "| vLLM 0.32.0 | file | 2.60 |  |  |  |  |" == ours
