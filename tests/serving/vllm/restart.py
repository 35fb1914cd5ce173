"""A server is started again, and its prompts' KV comes from the store. Then every page is damaged."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.answers import Asked
from serving.record import note
from serving.stores import KEEPING, Store, flip_in_files, opened
from serving.vllm.conftest import ENDING, ask_cold
from serving.vllm.server import CHUNK, VERSION, VLLMServer, fs, ours, tier


def fill(server: VLLMServer, asked: Asked) -> None:
    """Let a server compute all answers and store their pages."""
    seen = asked.again(server.ask)
    assert seen.is_equal, seen
    assert not seen.cached_tokens, seen
    server.settle()


def restarted(server: VLLMServer, store: Store, asked: Asked) -> None:
    """Look for all prompts in a store that another server has filled."""
    seen = asked.again(server.ask)
    note(VERSION, store.backend, "restart", seen, of=asked.page_tokens(CHUNK))
    assert seen.is_equal, seen
    assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


@pytest.mark.usefixtures("launched")
def test_a_restarted_server_takes_the_tokens_from_the_store(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One server fills a store, and one without checksums, which is the control of the comparison.

    It starts beside the server that gives the reference answers.
    """
    with opened("file", tmp_path) as store, opened("file", tmp_path / "unchecked") as unchecked:
        more = tier(unchecked.backend, unchecked.config, checksum="none")
        kv = ours(store.backend, store.config, secondary_tiers=[more])
        with VLLMServer(tmp_path / "filling", kv, *ENDING) as server:
            asked: Asked = request.getfixturevalue("asked")
            fill(server, asked)
            server.flush()
            assert unchecked.damage()
            seen = asked.again(server.ask)
            note(VERSION, "file", "the same without checksums", seen)
            assert seen.cached_tokens == asked.page_tokens(CHUNK), seen
            assert seen.different, seen  # on a busy machine, a prompt may still be in the CPU tier
            server.settle()
            server.end()
            assert not server.left

        kv = ours(store.backend, store.config)
        with VLLMServer(tmp_path / "restarted", kv, *ENDING) as server:
            restarted(server, store, asked)
            server.flush()
            damaged = store.damage()
            seen = asked.again(server.ask)
            corrupt = server.pages()["load:corrupt"]
            note(
                VERSION,
                "file",
                "a bit of every page is flipped while nobody asks",
                seen,
                pages=damaged,
            )
            assert seen.is_equal, seen
            assert not seen.cached_tokens, seen
            assert corrupt
            seen = ask_cold(server, asked)
            note(VERSION, "file", "and asked again: healed", seen)
            assert seen.is_equal, seen
            assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


@pytest.fixture(scope="module")
def filled(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Store]]:
    """Yield the other stores, which one server has filled at the same time."""
    directory = tmp_path_factory.mktemp("filled")
    with ExitStack() as stack:
        stores = {
            name: stack.enter_context(opened(name, directory / name))
            for name in KEEPING
            if name != "file"
        }
        (first, *_), more = stores.values(), [tier(s.backend, s.config) for s in stores.values()]
        kv = ours(first.backend, first.config, secondary_tiers=more[1:])
        with VLLMServer(directory / "server", kv, *ENDING) as server:
            fill(server, asked)
            server.end()
            assert not server.left
        yield stores


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*KEEPING} - {"file"}))
def test_the_other_stores(
    name: str, filled: dict[str, Store], asked: Asked, tmp_path: Path
) -> None:
    store = filled[name]
    kv = ours(store.backend, store.config)
    with VLLMServer(tmp_path / "restarted", kv, *ENDING) as server:
        restarted(server, store, asked)


@pytest.mark.long
def test_memory(asked: Asked, tmp_path: Path) -> None:
    """The pages of `memory` end with the process, so this server empties its own levels instead."""
    with (
        opened("memory", tmp_path, capacity_nbytes="1GiB") as store,
        VLLMServer(tmp_path / "server", ours(store.backend, store.config), *ENDING) as server,
    ):
        fill(server, asked)
        seen = ask_cold(server, asked)
        note(VERSION, "memory", "the engine's own levels are emptied", seen)
        assert seen.is_equal, seen
        assert seen.cached_tokens == asked.page_tokens(CHUNK), seen


@pytest.mark.long
def test_the_fs_tier_of_vllm(asked: Asked, tmp_path: Path) -> None:
    """The other control: what wrong pages do with a store that does not check them."""
    pages = tmp_path / "fs"
    with VLLMServer(tmp_path / "server", fs(pages), *ENDING) as server:
        fill(server, asked)
        server.flush()
        assert flip_in_files(pages.rglob("*.bin"))
        seen = asked.again(server.ask)
    note(VERSION, "vLLM's fs", "a bit of every page is flipped", seen)
    assert seen.cached_tokens == asked.page_tokens(CHUNK), seen
    assert seen.different, seen
