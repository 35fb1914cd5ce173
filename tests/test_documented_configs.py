"""Every config on a page or in an example is valid for its backend."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.sglang._settings import split_config
from hicache_storage.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "field"),
        *ROOT.glob("examples/*"),
    ]
)
BACKENDS = (
    *("memory", "file", "redis", "s3", "fsspec", "hf3fs", "mooncake"),
    *("tiered", "striped", "encrypted"),
)
# The text that names the backend of a config: a flag or call before the config, or a field in it.
NAMED = re.compile(r"--hicache-storage-backend[ =](\w+)|open_storage\(\s*\"(\w+)\"")
NEAR = 400
OURS = "hicache_storage.integrations.sglang"
A_ROW = re.compile(r'^\| `\w+` \| `("backend_name": .*?)` \|', re.MULTILINE)


def check(backend: str, config: dict[str, Any]) -> None:
    """Parse `config` by the backend's settings, and those of the stores inside it. Nothing is opened."""
    module = importlib.import_module(f"hicache_backends.{backend}")
    (name,) = (name for name in module.__all__ if name.endswith("Settings"))
    settings: type[Settings] = getattr(module, name)
    settings.parse(backend, config)
    members = config.get("tiers") or config.get("stripes") or ([config] * (backend == "encrypted"))
    for member in members:
        check(member["backend"], member.get("config", {}))


def objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every JSON object in a text, and the place where the object begins."""
    decoder, end = json.JSONDecoder(), 0
    for start in re.finditer(r"\{\s*\"", text):
        if start.start() >= end:
            try:
                value, end = decoder.raw_decode(text, start.start())
            except ValueError:
                continue
            yield start.start(), value


def shown(page: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (backend, config) for each config of a built-in backend on a page."""
    text = page.read_text(encoding="utf-8")
    text = text.replace("{scratch}", "/scratch").replace("{prefix}", "a-prefix")
    for row in A_ROW.finditer(text):
        config = json.loads(f"{{{row[1]}}}")
        yield config["backend_name"], split_config(config)[2]
    for start, found in objects(text):
        config = found.get("linker_extra_config", found)
        if "backend_name" in config and config.get("module_path", OURS) == OURS:
            name, _, fields = split_config(config)
            yield name, fields
            continue
        before = list(NAMED.finditer(text, max(0, start - NEAR), start))
        name = next(filter(None, before[-1].groups())) if before else ""
        if name in BACKENDS:
            yield name, config


CONFIGS = [
    pytest.param(name, config, id=f"{page.relative_to(ROOT)}-{number}-{name}")
    for page in PAGES
    if page.is_file() and page.suffix in {".md", ".py", ".json", ".toml", ".yaml"}
    for number, (name, config) in enumerate(shown(page))
]


def test_configs_are_found() -> None:
    """The search finds configs on each backend's own page, and of all backends on SGLang's page."""
    found = [str(parameter.id) for parameter in CONFIGS]
    for backend in BACKENDS[1:]:
        assert any(f"docs/backends/{backend}.md" in name for name in found), backend
        assert any("docs/sglang.md" in name and name.endswith(backend) for name in found), backend


@pytest.mark.parametrize(("backend", "config"), CONFIGS)
def test_a_documented_config_is_taken(backend: str, config: dict[str, Any]) -> None:
    check(backend, config)


@pytest.mark.parametrize("tiers", [[], ["encrypted"], ["tiered", "striped"]])
def test_a_config_that_is_not_taken_would_be_noticed(tiers: list[str]) -> None:
    backend, config = "s3", {"bucket": "kv"}
    for outer in tiers:
        backend, config = outer, around(outer, backend, config)

    with pytest.raises(ConfigError, match="bucket"):
        check(backend, config)


def around(outer: str, backend: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of `outer` whose store, or each of whose stores, has `config`."""
    if outer == "encrypted":
        keys = {"keys": {"a": {"env": "KEY"}}, "current_key": "a"}
        return {"backend": backend, "config": config, **keys}
    members = [{"name": name, "backend": backend, "config": config} for name in "ab"]
    return {"tiers" if outer == "tiered" else "stripes": members}
