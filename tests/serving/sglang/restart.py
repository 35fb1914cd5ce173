"""A server is started again, and its prompts' KV comes from the store. Then every page is damaged."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.answers import Asked, ask_all, compare
from serving.record import note
from serving.sglang.conftest import ask_cold
from serving.sglang.server import PAGE, VERSION, Attachment, SGLangServer, ours, own_file
from serving.stores import KEEPING, Store, flip_in_files, opened


def fill(server: SGLangServer, asked: Asked, store: Store) -> Attachment:
    """Attach an empty store and let the server write the KV of all prompts into it."""
    attachment = ours(store.backend, store.config)
    server.attach(attachment)
    seen = ask_cold(server, asked)
    assert seen.is_equal
    assert not seen.cached_tokens
    server.settle()
    return attachment


def look(server: SGLangServer, asked: Asked, store: Store, event: str) -> None:
    """Look for the KV of all prompts in the store that is attached."""
    seen = asked.again(server.ask)
    note(VERSION, store.backend, f"{server.plug_point}{event}", seen, of=asked.page_tokens(PAGE))
    assert seen.is_equal
    assert seen.cached_tokens == asked.page_tokens(PAGE)


def test_a_restarted_server_takes_the_tokens_from_the_store(
    server: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    with opened("file", tmp_path) as store:
        attachment = fill(server, asked, store)
        server.end()
        server.attached = attachment
        server.start()
        look(server, asked, store, "restart")
        pages = store.damage()
        seen = ask_cold(server, asked)
        note(
            VERSION,
            "file",
            f"{server.plug_point}a bit of every page is flipped while nobody asks",
            seen,
            pages=pages,
        )
        assert pages
        assert seen.is_equal
        assert not seen.cached_tokens
        seen = ask_cold(server, asked)
        note(VERSION, "file", f"{server.plug_point}and asked again: healed", seen)
        assert seen.is_equal
        assert seen.cached_tokens == asked.page_tokens(PAGE)


@pytest.mark.long
def test_logprobs_are_those_of_the_own_cache(
    server: SGLangServer, asked: Asked, tmp_path: Path
) -> None:
    """A prompt rounds otherwise in a batch: the reference is a prefix that SGLang had kept itself."""
    with opened("file", tmp_path) as store:
        server.attach(ours(store.backend, store.config))
        ask_cold(server, asked)
        kept = ask_all(server.ask, asked.prompts, clients=1)
        server.settle()
        server.flush()
        loaded = ask_all(server.ask, asked.prompts, clients=1)
        seen = compare(loaded, kept)
        event = "logprobs, beside those of SGLang's own prefix cache"
        note(VERSION, "file", f"{server.plug_point}{event}", seen)
        assert seen.is_equal
        assert seen.cached_tokens == asked.page_tokens(PAGE)
        assert [answer.logprobs for answer in loaded] == [answer.logprobs for answer in kept]
        server.detach()


@pytest.mark.long
def test_memory_outlives_a_flush(server: SGLangServer, asked: Asked) -> None:
    store = Store("memory", {})
    fill(server, asked, store)
    server.flush()
    look(server, asked, store, "both pools emptied")
    server.detach()


@pytest.mark.long
def test_the_other_stores(server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    """One restart for all: each store is filled before it, and attached after it."""
    with ExitStack() as stack:
        others = [name for name in KEEPING if name != "file"]
        stores = [stack.enter_context(opened(name, tmp_path / name)) for name in others]
        attachments = [fill(server, asked, store) for store in stores]
        server.end()
        server.attached = None
        server.start()
        for store, attachment in zip(stores, attachments, strict=True):
            server.attach(attachment)
            server.flush()
            look(server, asked, store, "restart")
            server.settle()
        server.detach()


def test_wrong_bytes_are_seen(server: SGLangServer, asked: Asked, tmp_path: Path) -> None:
    """The control: without checksums damaged pages are loaded, and answers differ."""
    with opened("file", tmp_path) as store:
        server.attach(ours(store.backend, store.config, {"checksum": "none"}))
        ask_cold(server, asked)
        server.settle()
        store.damage()
        seen = ask_cold(server, asked)
        note(VERSION, "file", f"{server.plug_point}the same without checksums", seen)
        assert seen.cached_tokens == asked.page_tokens(PAGE)
        assert seen.different == seen.answers
        server.detach()


def test_the_file_backend_of_sglang(server: SGLangServer, asked: Asked) -> None:
    """The other control: what wrong pages do with a store that does not check them."""
    server.attach(own_file())
    seen = ask_cold(server, asked)
    server.settle()
    assert flip_in_files(server.own_directory.rglob("*.bin"))
    seen = ask_cold(server, asked)
    note(VERSION, "SGLang's file", "a bit of every page is flipped", seen)
    assert seen.cached_tokens == asked.page_tokens(PAGE)
    assert seen.different
    server.detach()
