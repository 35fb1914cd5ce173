"""The sources of LMCache's key spaces, each with pairs of servers that differ in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from key_sources import Pair

from hicache_storage.integrations.lmcache._identity import Identity
from hicache_storage.integrations.lmcache._object_layouts import Layout
from hicache_storage.integrations.lmcache._settings import AdapterSettings

NAME = "LMCache"


def keys(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    settings: Mapping[str, Any] | None = None,
    version: str = "0.5.6",
    key: Mapping[str, Any] | None = None,
    shape: tuple[int, ...] = (2, 3, 256, 64),
    dtype: str = "float8_e4m3fn",
    nbytes: int = 4096,
) -> dict[str, str]:
    """Return the id of the key space of a server's objects."""
    fields = {"backend": "memory", "revision": "1", "platform": "cuda-sm90", **(settings or {})}
    adapter = AdapterSettings.of(fields)
    identity = Identity(adapter.labelled_revision(version), adapter.tenant, adapter.server)
    facts = {"model_name": "org/model", "kv_rank": 0x01000100, "object_group_id": 0}
    named = SimpleNamespace(**{**facts, "cache_salt": "", **(key or {})})
    layout = Layout(((shape, dtype),), nbytes, "")
    return {"kv": identity.space(cast("Any", named), layout).id}


_REVISION = [Pair(other={"settings": {"revision": "2"}})]

SOURCES: Mapping[str, Sequence[Pair]] = {
    "name of the model": [Pair(other={"key": {"model_name": "org-model"}})],
    "weights": _REVISION,
    "code and configs of the model": _REVISION,
    "files that changed after they were loaded": _REVISION,
    "LoRA adapters of the launch": [],
    "LoRA adapters that are loaded later": [],
    "draft model": _REVISION,
    "arguments": _REVISION,
    "environment": _REVISION,
    "effective values of defaults": [Pair(other={"version": "0.5.7"})],
    "platform": [
        Pair(other={"settings": {"platform": name}}) for name in ("cuda-sm100", "rocm-gfx942")
    ],
    "release of the engine": [
        Pair(other={"version": "0.5.7"}),
        Pair(other={"settings": {"share_between_releases": True}}),
        *_REVISION,
    ],
    "KV type": [Pair(other={"dtype": "float8_e4m3fnuz"})],
    "byte order": [Pair(other={"shape": (2, 256, 3, 64)})],
    "format of the engine's own pools": _REVISION,
    "size of a page": [
        Pair(other={"shape": (2, 3, 128, 64)}),
        Pair(other={"nbytes": 8192}),
    ],
    "layers and heads": [
        Pair(other={"shape": (2, 6, 256, 64)}),
        Pair(other={"key": {"kv_rank": 0x01010101}}),
        Pair(other={"key": {"object_group_id": 1}}),
    ],
    "pipeline and context parallelism": [
        Pair(one={"settings": {"server": "0/2"}}, other={"settings": {"server": "1/2"}})
    ],
    "tenant": [
        Pair(other={"settings": {"tenant": "other"}}),
        Pair(other={"key": {"cache_salt": "user"}}),
        Pair(
            one={"settings": {"tenant": "a@b"}, "key": {"cache_salt": "c"}},
            other={"settings": {"tenant": "a"}, "key": {"cache_salt": "b"}},
        ),
    ],
    "memory that another process maps": [],
}
