"""A thousand answers while random bits flip in the pages of the store: none of them is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.answers import Asked
from serving.damage import PROMPTS, ask_in_rounds
from serving.record import note
from serving.stores import flip_in_files, opened
from serving.vllm.conftest import SMALL, SMALL_NBYTES, many
from serving.vllm.server import VERSION, VLLMServer, fs, ours

_EVENT = "random bits flip between rounds"


@pytest.fixture(scope="module")
def asked(reference: VLLMServer) -> Asked:
    """Return more prompts than a server holds."""
    return many(reference, PROMPTS)


@pytest.mark.long
def test_no_answer_is_wrong(asked: Asked, tmp_path: Path) -> None:
    with opened("file", tmp_path) as store:
        kv = ours(store.backend, store.config, SMALL_NBYTES)
        with VLLMServer(tmp_path / "server", kv, *SMALL) as server:
            seen, pages = ask_in_rounds(server, asked, store.damage)
            server.settle()
            corrupt = server.pages().get("load:corrupt", 0)
    note(VERSION, "file", _EVENT, seen, pages=pages, seen_as_corrupt=corrupt)
    assert seen.is_equal, seen
    assert seen.cached_tokens, seen
    assert corrupt


@pytest.mark.long
def test_the_fs_tier_of_vllm(asked: Asked, tmp_path: Path) -> None:
    """The control: a store without checksums gives the damaged pages back."""
    pages = tmp_path / "fs"

    def damage(share: float, seed: int) -> int:
        return flip_in_files(pages.rglob("*.bin"), share, seed)

    with VLLMServer(tmp_path / "server", fs(pages, SMALL_NBYTES), *SMALL) as server:
        seen, damaged = ask_in_rounds(server, asked, damage)
    note(VERSION, "vLLM's fs", _EVENT, seen, pages=damaged)
    assert seen.different, seen
