from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.observers import open_observers

MODULES = (
    "hicache_storage.observers",
    "hicache_storage.page_store",
    "hicache_storage.controller",
    "hicache_storage.replay.job",
    "hicache_storage.cli.replay",
    "hicache_storage.integrations._jobs",
    "hicache_storage.integrations.sglang._adapter",
    "hicache_storage.integrations.vllm._tier",
    "hicache_storage.integrations.lmcache._adapter",
)
USE = """
from hicache_storage.page_store import PageStore
from hicache_storage.registry import open_storage
from hicache_storage.observers import open_observers
with open_storage("memory") as storage:
    observers = open_observers(tracing={tracing}, attributes={{}})
    with PageStore(storage, observers=observers) as store:
        store.begin_activity("prefetch", {{}}).end({{}})
"""


@pytest.mark.parametrize("tracing", [False, True])
def test_opentelemetry_is_imported_only_for_tracing(*, tracing: bool) -> None:
    program = (
        "".join(f"import {module}\n" for module in MODULES)
        + USE.format(tracing=tracing)
        + "import sys\nprint('opentelemetry' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )

    assert f"{tracing}\n" == done.stdout


def test_tracing_is_one_observer() -> None:
    assert [] == open_observers(tracing=False, attributes={})
    assert ["SpanTracer"] == [
        type(each).__name__ for each in open_observers(tracing=True, attributes={})
    ]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hicache_storage.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ConfigError, match=r"tracing: .*hicache-storage\[otel\]"):
        open_observers(tracing=True, attributes={})
