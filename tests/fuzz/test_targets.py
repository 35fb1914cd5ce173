"""Each target holds for its corpus, and for inputs mutated from the corpus.

`make fuzz` gives each target ten million inputs under atheris, guided by coverage.
"""

from __future__ import annotations

import pytest
from fuzz.catalogue import NAMES, Target
from fuzz.generated import first_finding, inputs

pytestmark = pytest.mark.no_cover

INPUTS = 300


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_misjudged(name: str) -> None:
    target = Target.load(name)
    found = first_finding(target, INPUTS)
    if found is not None:
        target.check(found[1])  # raises what it raised before

    assert found is None


def test_equal_seeds_give_equal_inputs() -> None:
    target = Target.load("manifests")

    assert list(inputs(target, 50, seed=3)) == list(inputs(target, 50, seed=3))
    assert list(inputs(target, 50, seed=3)) != list(inputs(target, 50, seed=4))


def test_corpora_are_small() -> None:
    """The corpora have few and small inputs, because they are kept with the sources."""
    for name in NAMES:
        corpus = Target.load(name).corpus()

        assert len(corpus) < 60
        assert max(map(len, corpus)) <= 8192
