"""The metrics of the adapter: on LMCache's own `/metrics`, and on a port of their own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from lmcache_engine import Engine
from scrapes import exposition, sample
from servers import free_port

from hicache_storage.metrics import ViewCollector, serve

LABELS = {"engine": "lmcache", "backend": "file", "rank": "0"}


def own_exposition() -> str:
    """Return the text of `/metrics` of LMCache's HTTP server."""
    app = importlib.import_module("lmcache.v1.multiprocess.http_server").app
    client = importlib.import_module("starlette.testclient").TestClient(app)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return str(answer.text)


@pytest.mark.parametrize("own", [True, False])
def test_objects_are_counted_on_both_endpoints(file_params: dict[str, Any], *, own: bool) -> None:
    port = free_port()
    with Engine({**file_params, "metrics_port": port}) as engine:
        engine.write(range(4))
        engine.wipe()
        engine.read(range(4))
        text = own_exposition() if own else exposition(port)

    for direction in ("load", "save"):
        moved = {**LABELS, "direction": direction, "verdict": "ok"}
        assert 4 == sample(text, "hicache_pages_total", **moved)
    assert 1 == sample(text, "hicache_store_attached", **LABELS)
    assert sample(text, "hicache_engine_events_total", **LABELS, event="load_jobs")


def test_a_detached_store_is_shown(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine:
        engine.adapter.reconfigure("detach", {})

        assert 0 == sample(own_exposition(), "hicache_store_attached", **LABELS)


def test_an_attach_to_another_backend_changes_the_label(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine:
        engine.adapter.reconfigure("attach", {"backend": "memory", "config": {}})

        text = own_exposition()
    assert 1 == sample(text, "hicache_store_attached", **{**LABELS, "backend": "memory"})
    assert sample(text, "hicache_store_attached", **LABELS) is None


def test_a_closed_adapter_is_not_shown(file_params: dict[str, Any]) -> None:
    with Engine(file_params):
        pass

    assert sample(own_exposition(), "hicache_store_attached", **LABELS) is None


def test_a_port_in_use_does_not_stop_the_server(
    file_params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serve(ViewCollector(), port=0) as taken,
        Engine({**file_params, "metrics_port": taken.port}) as engine,
    ):
        held = engine.write(range(2))
        engine.wipe()
        assert held == engine.read(range(2)).held

    assert "choose another port" in caplog.text
