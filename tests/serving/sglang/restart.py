"""A server is started again, and its prompts' KV comes from the store. Then every page is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.record import note
from serving.sglang.conftest import Asked
from serving.sglang.server import VERSION, SGLangServer, ours, own_file
from serving.stores import KEEPING, Store, flip_in_files, opened


def restarted(server: SGLangServer, asked: Asked, store: Store) -> None:
    """Fill a store, start the server again over it, and look for all prompts in it."""
    attachment = ours(store.backend, store.config)
    server.attach(attachment)
    seen, cached = asked.ask_cold(server)
    assert seen.is_equal
    assert not cached
    server.settle()
    server.end()
    server.attached = attachment
    server.start()
    seen, cached = asked.ask(server)
    note(VERSION, store.backend, "restart", seen, from_the_store=cached, of=asked.stored_tokens)
    assert seen.is_equal
    assert cached == asked.stored_tokens


def test_a_restarted_server_takes_the_tokens_from_the_store(
    server: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    with opened("file", tmp_path) as store:
        restarted(server, asked, store)
        pages = store.damage()
        seen, cached = asked.ask_cold(server)
        note(VERSION, "file", "a bit of every page is flipped", seen, pages=pages, cached=cached)
        assert pages
        assert seen.is_equal
        assert not cached
        seen, cached = asked.ask_cold(server)
        note(VERSION, "file", "and asked again: healed", seen, from_the_store=cached)
        assert seen.is_equal
        assert cached == asked.stored_tokens


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({*KEEPING} - {"file"}))
def test_the_other_stores(name: str, server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    with opened(name, tmp_path) as store:
        restarted(server, asked, store)
        server.detach()


def test_wrong_bytes_are_seen(server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    """The control: without checksums damaged pages are loaded, and answers differ."""
    with opened("file", tmp_path) as store:
        server.attach(ours(store.backend, store.config, {"checksum": "none"}))
        asked.ask_cold(server)
        server.settle()
        store.damage()
        seen, cached = asked.ask_cold(server)
        note(VERSION, "file", "the same without checksums", seen, from_the_store=cached)
        assert cached == asked.stored_tokens
        assert seen.different == seen.answers
        server.detach()


def test_the_file_backend_of_sglang(server: SGLangServer, asked: Asked) -> None:
    """The other control: what wrong pages do with a store that does not check them."""
    server.attach(own_file())
    seen, _ = asked.ask_cold(server)
    server.settle()
    assert flip_in_files(server.own_directory.rglob("*.bin"))
    seen, cached = asked.ask_cold(server)
    note(VERSION, "SGLang's file", "a bit of every page is flipped", seen, from_the_store=cached)
    assert cached == asked.stored_tokens
    assert seen.different
    server.detach()
