"""The example shows that a restored draft KV cache gives the same drafts, token for token."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "speculative_decoding.py"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("speculative_decoding", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["speculative_decoding"] = module
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    del sys.modules["speculative_decoding"]


@pytest.fixture(scope="module")
def answers(example: Any) -> Any:
    return example.compare()


def test_every_answer_is_the_targets_own(example: Any, answers: Any) -> None:
    own = answers["target alone"].tokens

    assert example.ANSWER_TOKENS == len(own)
    for answer in answers.values():
        assert own == answer.tokens[: len(own)]


def test_the_answer_depends_on_the_document(answers: Any) -> None:
    """If every answer were one repeated token, equal answers with restored pages would prove nothing."""
    assert len(set(answers["target alone"].tokens)) > 48


@pytest.mark.parametrize(
    "way", ["restored, target and draft", "draft computed again", "restored after that"]
)
def test_with_the_drafts_pages_every_step_yields_as_much_as_before(answers: Any, way: str) -> None:
    before, after = answers["never evicted"], answers[way]

    assert before.tokens == after.tokens
    assert before.steps == after.steps


def test_without_the_draft_the_acceptance_length_falls_to_that_of_no_draft(answers: Any) -> None:
    assert answers["never evicted"].acceptance_length > 2
    assert answers["restored, target only"].acceptance_length < 1.2
    assert answers["target alone"].acceptance_length == 1
