"""What the scenarios of the two folders of `deploy` share: an engine's container, over that of Redis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from manifests import DeployedRedis, EngineHost, new_secret
from scrapes import exposition, sample
from servers import free_port, wait_until
from serving.answers import Answer
from serving.engine import EngineServer
from serving.models import TINY, checkpoint, prompt

_LENGTH = 1500


def restart(
    engine: str, directory: Path, start: Callable[[Path, EngineHost], EngineServer]
) -> None:
    """Ask a server a prompt, and then one that is started after it, which loads the prompt's pages."""
    secret, metrics = new_secret(), free_port()
    with DeployedRedis(directory / "redis", engine, secret) as redis:

        def ask(name: str, direction: str) -> Answer:
            host = EngineHost(directory / name, engine, redis, secret)
            host.replaced |= {
                "Qwen/Qwen3-8B": str(checkpoint(TINY)),
                "0.0.0.0": "127.0.0.1",  # noqa: S104 - only this machine may connect
                "9401": str(metrics),
            }

            def moved() -> bool:
                fields = {"direction": direction, "verdict": "ok"}
                return bool(sample(exposition(metrics), "hicache_pages_total", **fields))

            with start(directory / f"server-{name}", host) as server:
                answer = server.ask(prompt(0, _LENGTH))
                wait_until(moved)
                server.settle()
                server.end()
            return answer

        computed, loaded = ask("first", "save"), ask("second", "load")
    assert not computed.error + loaded.error
    assert not computed.cached_tokens
    assert loaded.cached_tokens
    assert loaded.tokens == computed.tokens
