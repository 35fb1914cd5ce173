"""A thousand answers while random bits flip in the pages of the store: none of them is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.answers import Asked
from serving.damage import PROMPTS, ask_in_rounds
from serving.record import note
from serving.sglang.conftest import PLUG_POINTS, many
from serving.sglang.server import VERSION, SGLangServer, ours, own_file
from serving.stores import flip_in_files, opened


@pytest.fixture(scope="module")
def asked(small: SGLangServer) -> Asked:
    """Return more prompts than the pools hold."""
    return many(small, PROMPTS)


@pytest.mark.long
@pytest.mark.parametrize("small", PLUG_POINTS, indirect=True)
def test_no_answer_is_wrong(small: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    small.detach()
    small.flush()
    with opened("file", tmp_path) as store:
        small.attach(ours(store.backend, store.config))
        seen, pages = ask_in_rounds(small, asked, store.damage)
        corrupt = small.pages().get("load:corrupt", 0)
        note(
            VERSION,
            "file",
            f"{small.plug_point}random bits flip between rounds",
            seen,
            pages=pages,
            seen_as_corrupt=corrupt,
        )
    assert seen.is_equal
    assert seen.cached_tokens
    assert corrupt


@pytest.mark.long
@pytest.mark.parametrize("small", PLUG_POINTS[:1], indirect=True)
def test_the_file_backend_of_sglang(small: SGLangServer, asked: Asked) -> None:
    """The control: a store without checksums gives the damaged pages back."""

    def damage(share: float, seed: int) -> int:
        return flip_in_files(small.own_directory.rglob("*.bin"), share, seed)

    small.detach()
    small.flush()
    small.attach(own_file())
    seen, pages = ask_in_rounds(small, asked, damage)
    note(VERSION, "SGLang's file", "random bits flip between rounds", seen, pages=pages)
    small.settle()
    small.detach()
    assert seen.different
