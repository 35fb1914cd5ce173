from __future__ import annotations

import re
from pathlib import Path

import pytest
from hicache_conformance.rules import FAMILIES, RULES, selected

from hicache_storage.errors import ConfigError

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


def contract_rules() -> dict[str, str]:
    """Return the rules of the contract, by number: their text without line breaks."""
    section = CONTRACT.read_text(encoding="utf-8").split("## 5.")[1].split("\n## 6.")[0]
    flat = " ".join(re.sub(r"^\*\*.*\*\*$", "", section, flags=re.MULTILINE).split())
    parts = re.split(r"\*? ?(KV-\d\d\d) ", flat)[1:]
    return {
        number: text.removesuffix("*").strip()
        for number, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_rules_are_those_of_the_contract_word_for_word() -> None:
    assert contract_rules() == {rule.id: rule.statement for rule in RULES.values()}


def test_every_rule_belongs_to_a_family() -> None:
    assert list(FAMILIES.values()) == list(dict.fromkeys(r.family for r in RULES.values()))


def test_a_pattern_selects_by_number() -> None:
    assert {"KV-001"} == {rule.id for rule in selected(["KV-001"])}
    assert {"3", "9"} == {rule.id[3] for rule in selected(["kv-3*", "KV-9*"])}


def test_no_pattern_selects_every_rule() -> None:
    assert list(RULES.values()) == selected()


def test_a_pattern_that_names_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV-7"):
        selected(["KV-7*"])


def test_a_version_that_the_kit_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"9\.9"):
        selected(spec="9.9")
