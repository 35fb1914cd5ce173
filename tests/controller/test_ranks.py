"""The topics by which ranks compare their requests, and request ids as messages show them."""

from __future__ import annotations

import pytest
from pages import hash_of

from hicache_storage.controller.ranks import Topic, shown_id

A, B = hash_of(1), hash_of(2)


def test_a_topic_is_the_request_and_its_whole_prompt() -> None:
    topics = [
        Topic.of_request("r", [A, B]),
        Topic.of_request("s", [A, B]),
        Topic.of_request("r", [B, A]),
        Topic.of_request("r", [B, B]),
        Topic.of_request("r", [B]),
        Topic.of_request("r", []),
        Topic.of("r"),
    ]

    assert len({topic.digest for topic in topics}) == len(topics)
    assert Topic.of_request("r", [A, B]) == topics[0]


def test_a_question_is_another_with_another_length_or_text() -> None:
    topic = Topic.of_request("\ud800", [A])

    codes = [topic.code("claims", 4), topic.code("claims", 5), topic.code("claims in '\ud801'", 4)]

    assert len(set(codes)) == 3
    assert all(0 <= code < 2**62 for code in codes)


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        ("", "''"),
        ("\ud800\n", "'\\ud800\\n'"),
        ("x" * 201, f"'{'x' * 200}'... of 201 characters"),
    ],
)
def test_an_id_is_shown_in_one_short_line(request_id: str, shown: str) -> None:
    assert shown_id(request_id) == shown
