"""Which environment variables are in the identity of an engine's KV."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_storage.integrations._variables import VariableTable

TABLE = VariableTable(
    engine="E",
    entering={"FLAG": True, "COUNT": 1, "SCALE": 0.0, "TEXT": "", "ANY": None},
    elsewhere={"ORDER": "`layout`"},
    inert={"Logs.": "LEVEL"},
)


def test_an_unset_variable_is_absent() -> None:
    assert TABLE.facts(["FLAG", "OF_TOMORROW"]) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("FLAG", "1"), ("FLAG", "TRUE"), ("COUNT", " 1"), ("SCALE", "0"), ("TEXT", "")],
)
def test_a_neutral_value_is_absent(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)

    assert TABLE.facts([]) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("FLAG", "0"), ("FLAG", "no"), ("COUNT", "0"), ("SCALE", "wrong"), ("TEXT", "a"), ("ANY", "")],
)
def test_another_value_is_a_fact(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)

    assert TABLE.facts([]) == {name: text}


@pytest.mark.parametrize("name", ["ORDER", "LEVEL", "OF_NOBODY"])
def test_a_variable_that_kv_does_not_depend_on_is_absent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")

    assert TABLE.facts(["ORDER", "LEVEL"]) == {}


def test_a_variable_of_a_later_release_is_a_fact_without_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts: list[dict[str, str]] = []
    for text in ("hush-1", "hush-2"):
        monkeypatch.setenv("OF_TOMORROW", text)
        facts.append(TABLE.facts(["OF_TOMORROW"]))

    assert facts[0].keys() == facts[1].keys() == {"OF_TOMORROW"}
    assert facts[0] != facts[1]
    assert "hush" not in f"{facts} {caplog.text}"
    assert "E's environment variable OF_TOMORROW" in caplog.text


def test_a_file_is_known_by_its_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts: list[dict[str, str]] = []
    for place, content in (("a", "one"), ("b", "one"), ("b", "two")):
        (tmp_path / place).write_text(content)
        monkeypatch.setenv("ANY", str(tmp_path / place))
        facts.append(TABLE.facts([]))

    assert facts[0] == facts[1]
    assert facts[1] != facts[2]


def test_every_variable_is_classified_once_with_its_reason() -> None:
    assert {name: (how, why) for name, how, why in TABLE.classified()} == {
        "FLAG": ("enters", "`revision`, by its value, unless that is `True`"),
        "COUNT": ("enters", "`revision`, by its value, unless that is `1`"),
        "SCALE": ("enters", "`revision`, by its value, unless that is `0.0`"),
        "TEXT": ("enters", "`revision`, by its value, unless it is empty"),
        "ANY": ("enters", "`revision`, by its value"),
        "ORDER": ("enters", "`layout`"),
        "LEVEL": ("cannot", "Logs."),
    }
