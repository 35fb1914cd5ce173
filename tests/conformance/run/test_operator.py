from __future__ import annotations

from pathlib import Path

import pytest
from hicache_conformance.run.operator import deployed_store, filled
from hicache_conformance.run.subject import Scratch

from hicache_storage.errors import UnknownBackend

SCRATCH = Scratch(Path("/scratch/1"), "hc12")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{scratch}/pages", "/scratch/1/pages"),
        ("kv:{prefix}:", "kv:hc12:"),
        ({"a": ["{prefix}", 7, None]}, {"a": ["hc12", 7, None]}),
        ("{other} {}", "{other} {}"),
        (True, True),
    ],
)
def test_placeholders_are_replaced_in_every_string(template: object, expected: object) -> None:
    assert expected == filled(template, SCRATCH)


def test_each_test_gets_a_config_of_its_own() -> None:
    _, make_subject = deployed_store("file", {"path": "{scratch}"})

    first = make_subject().config(SCRATCH)
    second = make_subject().config(Scratch(Path("/scratch/2"), "hc13"))

    assert ({"path": "/scratch/1"}, {"path": "/scratch/2"}) == (first, second)


def test_a_name_that_nobody_has_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownBackend, match="did you mean 'file'"):
        deployed_store("flie", {})
