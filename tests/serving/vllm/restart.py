"""A server is started again, and its prompts' KV comes from the store. Then every page is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving.answers import Asked, Comparison
from serving.record import note
from serving.vllm.server import CHUNK, VERSION, VLLMServer, ours


def damage(directory: Path) -> int:
    """Change a byte in every 4 KiB of every page. Return the number of pages."""
    pages = [
        path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 65536
    ]
    for path in pages:
        data = bytearray(path.read_bytes())
        data[8195:-8192:4096] = bytes(byte ^ 0x81 for byte in data[8195:-8192:4096])
        path.write_bytes(data)
    return len(pages)


def served(directory: Path, kv: dict[str, Any], asked: Asked) -> tuple[Comparison, dict[str, int]]:
    """Ask a new server. Return how its answers compare, and what became of pages."""
    with VLLMServer(directory, kv, "--shutdown-timeout", "10") as server:
        seen = asked.again(server.ask)
        server.settle()
        pages = server.pages()
        server.end()
        assert not server.regions()
    return seen, pages


def test_a_cold_server_takes_the_tokens_from_the_store(
    asked: Asked, directory: Path, tmp_path: Path
) -> None:
    kv = ours("file", {"path": str(directory)})
    seen, _ = served(tmp_path / "filling", kv, asked)
    assert seen.is_equal
    assert not seen.cached_tokens
    seen, _ = served(tmp_path / "restarted", kv, asked)
    note(VERSION, "file", "restart", seen)
    assert seen.is_equal
    assert seen.cached_tokens == asked.page_tokens(CHUNK)

    damaged = damage(directory)
    seen, pages = served(tmp_path / "damaged", kv, asked)
    note(VERSION, "file", "every page is damaged", seen, pages=damaged, healed=pages["store:ok"])
    assert seen.is_equal
    assert pages["load:corrupt"] > 0
    seen, _ = served(tmp_path / "healed", kv, asked)
    assert seen.is_equal
    assert seen.cached_tokens == asked.page_tokens(CHUNK)


def test_wrong_bytes_are_seen(asked: Asked, directory: Path, tmp_path: Path) -> None:
    """The control: without checksums damaged pages are loaded, and the answers differ."""
    kv = ours("file", {"path": str(directory)}, checksum="none")
    served(tmp_path / "filling", kv, asked)
    damage(directory)
    seen, _ = served(tmp_path / "damaged", kv, asked)
    note(VERSION, "file", "damaged, without checksums", seen)
    assert seen.cached_tokens
    assert seen.different == seen.answers
