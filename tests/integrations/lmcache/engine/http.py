"""Attach and detach at run time, over LMCache's own HTTP server."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import threading
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_engine import ADAPTER, Engine, parse_config
from servers import ServerProcess, free_port, wait_until

RECONFIGURE = "/reconfigure/plugin/l2"
OBJECTS = "/cache/objects"


@contextmanager
def client_of(engine: Engine) -> Generator[Any]:
    """Yield a client of LMCache's HTTP application over the engine's storage manager."""
    app = importlib.import_module("lmcache.v1.multiprocess.http_server").app
    dependencies = importlib.import_module("lmcache.v1.multiprocess.http_apis.dependencies")
    client = importlib.import_module("starlette.testclient").TestClient(app)
    app.state.engine = SimpleNamespace(storage_manager=engine.manager)
    app.state.context = dependencies.build_context(app.state.engine)
    try:
        yield client
    finally:
        del app.state.engine, app.state.context


def test_detach_and_attach_under_a_running_manager(params: dict[str, Any]) -> None:
    with Engine(params) as engine, client_of(engine) as client:
        held = engine.write(range(4))
        engine.wipe()

        assert {"attached": False, "adapter_index": 0} == _post(client, "detach")
        assert 0 == engine.read(range(4)).chunks
        engine.write(range(10, 12), wait=False)
        engine.wipe()
        status = client.get(f"{RECONFIGURE}/status").json()
        assert not status["adapters"][0]["status"]["attached"]

        assert {"attached": True, "adapter_index": 0} == _post(client, "attach")
        assert held == engine.read(range(4)).held


def test_an_attach_with_another_revision_begins_a_new_key_space(
    file_params: dict[str, Any],
) -> None:
    with Engine(file_params) as engine, client_of(engine) as client:
        held = engine.write(range(4))
        engine.wipe()
        _post(client, "attach", revision="step-2")
        assert 0 == engine.read(range(4)).chunks
        _post(client, "attach", revision="main")
        assert held == engine.read(range(4)).held


@pytest.mark.parametrize(
    ("operation", "fields", "message"),
    [
        ("attach", {"tenent": "x"}, "did you mean 'tenant'"),
        ("attach", {"backend": "rediss"}, "did you mean"),
        ("attach", {"config": {"paht": "x"}}, "paht"),
        ("attach", {"serde": {"type": "nothing"}}, "nothing"),
        ("add", {}, "attach or detach"),
    ],
)
def test_a_wrong_attach_is_refused_by_name_and_changes_nothing(
    operation: str, fields: dict[str, Any], message: str, file_params: dict[str, Any]
) -> None:
    with Engine(file_params) as engine, client_of(engine) as client:
        held = engine.write(range(2))
        engine.wipe()
        answer = client.post(f"{RECONFIGURE}/{operation}", json=fields)
        assert 400 == answer.status_code
        assert message in answer.json()["error"]
        assert held == engine.read(range(2)).held


def test_detach_and_attach_under_traffic(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine, client_of(engine) as client:
        held = engine.write(range(4))
        stop = threading.Event()
        turns: list[int] = []

        def toggle() -> None:
            while not stop.is_set():
                _post(client, "detach")
                _post(client, "attach")
                turns.append(1)

        thread = threading.Thread(target=toggle)
        thread.start()
        try:
            wait_until(lambda: bool(turns))
            for _ in range(20):
                engine.wipe()
                read = engine.read(range(4))
                assert read.held[0] == held[0][: read.chunks]
                assert read.elapsed_s < 10
        finally:
            stop.set()
            thread.join()
        engine.wipe()
        assert held == engine.read(range(4)).held


def test_lmcache_removes_and_adds_the_adapter_itself(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine:
        held = engine.write(range(4))
        engine.wipe()
        ((descriptor, _),) = engine.manager.l2_adapters()
        engine.manager.delete_l2_adapter(descriptor.index)
        (config,) = parse_config(
            {**ADAPTER, "adapter_params": file_params}
        ).l2_adapter_config.adapters
        engine.manager.add_l2_adapter(config)
        assert held == engine.read(range(4)).held


def test_lmcache_lists_the_objects_of_a_store_page_by_page(params: dict[str, Any]) -> None:
    with Engine(params) as engine, client_of(engine) as client:
        held = engine.write(range(5))
        first = client.get(OBJECTS, params={"page_size": 3}).json()
        token = first["next_page_token"]
        rest = client.get(OBJECTS, params={"page_size": 3, "page_token": token}).json()
        entries = [*first["entries"], *rest["entries"]]

        assert (3, None) == (len(first["entries"]), rest["next_page_token"])
        (keys,) = engine.plan.keys(range(5))
        expected = [dataclasses.asdict(key.to_encoded_object_key()) for key in keys]
        assert expected == sorted((one["key"] for one in entries), key=str)
        assert {len(held[0][0])} == {one["size_bytes"] for one in entries}


def test_a_listing_names_the_objects_that_a_delete_removes(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine, client_of(engine) as client:
        engine.write(range(3))
        entries = client.get(OBJECTS, params={"model_name": "org/model"}).json()["entries"]
        gone = {"tier": "l2", "keys": [entries[0]["key"]]}
        assert client.request("DELETE", OBJECTS, json=gone).json()["ok"]
        assert entries[1:] == client.get(OBJECTS).json()["entries"]
        assert [] == client.get(OBJECTS, params={"model_name": "other"}).json()["entries"]


def test_a_wrong_page_token_is_refused(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine, client_of(engine) as client:
        answer = client.get(OBJECTS, params={"page_token": "x"})
        assert (400, True) == (answer.status_code, "not a cursor of a listing" in answer.text)


def test_a_store_that_lists_nothing_is_named(file_params: dict[str, Any]) -> None:
    with (
        Engine(file_params, wrap=unlisted) as engine,
        client_of(engine) as client,
    ):
        answer = client.get(OBJECTS)
        assert (503, True) == (answer.status_code, "'file' does not list" in answer.text)


def unlisted(storage: Any) -> Any:
    """Return a storage that cannot list its pages."""
    storage.narrow(enumerable=False)
    return storage


class LMCacheServer(ServerProcess):
    """`lmcache server` on a CPU, with one L2 adapter."""

    ready_limit_s = 120.0  # its imports take long beside other tests

    def __init__(self, directory: Path, spec: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self.spec = spec
        self.queue_port = free_port()

    def command(self) -> list[str]:
        program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        return [
            *(sys.executable, "-c", program, "server", "--disable-observability"),
            *("--host", "127.0.0.1", "--port", str(self.queue_port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.port)),
            *("--l1-size-gb", "0.02", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(self.spec)),
        ]

    def answers(self) -> bool:
        return bool(self.ask("/healthcheck"))

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to a GET, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
            return json.load(answer)


@pytest.mark.timeout(180)
def test_lmcaches_server_as_its_users_start_it(tmp_path: Path, file_params: dict[str, Any]) -> None:
    with LMCacheServer(tmp_path, {**ADAPTER, "adapter_params": file_params}) as server:
        (adapter,) = server.ask("/status")["storage_manager"]["l2_adapters"]
        assert ("HiCacheL2Adapter", True) == (adapter["type"], adapter["is_healthy"])
        (listed,) = server.ask("/config/adapters")["adapters"]
        assert ("plugin", True) == (listed["type_name"], listed["reconfigurable"])
        assert not server.ask(f"{RECONFIGURE}/detach", {})["attached"]
        assert server.ask(f"{RECONFIGURE}/attach", {"revision": "step-2"})["attached"]


def _post(client: Any, operation: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"{RECONFIGURE}/{operation}", json=fields)
    assert 200 == answer.status_code, answer.text
    found: dict[str, Any] = answer.json()
    return found
