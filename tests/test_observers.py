from __future__ import annotations

import re
import subprocess
import sys

import pytest
from servers import free_port

from hicache_storage.errors import ConfigError, install_command
from hicache_storage.events.settings import EventSettings
from hicache_storage.observers import EventSource, open_observers

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
def test_the_extras_are_imported_only_where_they_are_wanted(*, tracing: bool) -> None:
    program = (
        "".join(f"import {module}\n" for module in MODULES)
        + USE.format(tracing=tracing)
        + "import sys\nprint({'opentelemetry', 'zmq', 'msgspec'} & set(sys.modules) or False)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )

    assert ("{'opentelemetry'}\n" if tracing else "False\n") == done.stdout


def test_tracing_is_one_observer() -> None:
    assert [] == open_observers(tracing=False, attributes={})
    assert ["SpanTracer"] == [
        type(each).__name__ for each in open_observers(tracing=True, attributes={})
    ]


def test_events_are_another_one() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    source = EventSource(
        settings=EventSettings(endpoint=endpoint, bind=True),
        announces=lambda space: True,
        hash_format="int64",
    )

    observers = open_observers(tracing=True, attributes={}, events=source)
    for observer in observers:
        observer.close()

    assert ["SpanTracer", "EventObserver"] == [type(each).__name__ for each in observers]


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("opentelemetry", "hicache_storage.tracing", "otel"),
        ("zmq", "hicache_storage.events.publisher", "events"),
        ("msgspec", "hicache_storage.events.messages", "events"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, module: str, extra: str
) -> None:
    for name in (module, "hicache_storage.events.observer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    tracing = package == "opentelemetry"
    source = EventSource(
        settings=EventSettings(endpoint="tcp://127.0.0.1:1"),
        announces=lambda space: True,
        hash_format="int64",
    )

    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        open_observers(tracing=tracing, attributes={}, events=None if tracing else source)
