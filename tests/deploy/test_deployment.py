"""What `deploy` has for Kubernetes and systemd: schemas, configs, and what the commands do here."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import code_blocks
from hicache_backends.redis import RedisSettings
from manifests import (
    DEPLOY,
    ENGINES,
    DeployedRedis,
    EngineHost,
    Manifest,
    container,
    kustomized,
    new_secret,
    pod,
)
from prometheus_server import ALERTS, promtool
from servers import ROOT, RedisServer, free_port, library_path, program

from hicache_storage.integrations.sglang._settings import split_config
from hicache_storage.integrations.vllm._settings import complete_tiers, tier_settings

KUBERNETES: Any = importlib.import_module("kubernetes_validate")  # it has no types
SCHEMA = "1.37"
PAGE = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
STORE = "@/etc/hicache/store.yaml"


# --- what Kubernetes gets


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Return the name of an engine, of its folder and of its container."""
    return str(request.param)


@pytest.fixture(scope="module")
def built(engine: str) -> list[Manifest]:
    """Return the manifests of the engine's folder."""
    return kustomized(DEPLOY / engine)


def test_the_schemas_accept_the_manifests(built: list[Manifest]) -> None:
    for manifest in built:
        KUBERNETES.validate(manifest, SCHEMA, strict=True)


def test_what_a_pod_mounts_exists(engine: str, built: list[Manifest]) -> None:
    """Nothing but the Secret of the page is left to make."""
    made = {one["metadata"]["name"] for one in built if one["kind"] == "ConfigMap"}
    for name in (f"hicache-{engine}", "hicache-redis"):
        volumes = pod(built, name)["volumes"]
        assert {one["configMap"]["name"] for one in volumes if "configMap" in one} <= made
        (secret,) = (one["secret"] for one in volumes if "secret" in one)
        assert secret["secretName"] == "hicache-redis"
        assert f"--from-file={secret['items'][0]['key']}" in PAGE


def test_services_and_scrapes_lead_to_ports_of_pods(engine: str, built: list[Manifest]) -> None:
    for service in (one for one in built if one["kind"] == "Service"):
        name = service["metadata"]["name"]
        assert service["spec"]["selector"] == {"app.kubernetes.io/name": name}
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] in _ports(pod(built, name)["containers"][0])
    (monitored,) = _monitor()["spec"]["podMetricsEndpoints"]
    assert monitored["port"] in _ports(container(pod(built, f"hicache-{engine}"), engine))
    assert monitored["port"] in (DEPLOY / "prometheus/scrape.yml").read_text(encoding="utf-8")


def test_alerts_and_dashboard_are_the_files_of_other_installations(built: list[Manifest]) -> None:
    data = _config_maps(built)

    assert data["hicache-prometheus"]["alerts.yml"] == ALERTS.read_text(encoding="utf-8")
    dashboard = (DEPLOY / "grafana/hicache.json").read_text(encoding="utf-8")
    assert data["hicache-grafana"]["hicache.json"] == dashboard


def test_an_engine_has_more_memory_than_its_host_cache(built: list[Manifest], engine: str) -> None:
    spec = pod(built, f"hicache-{engine}")
    (shm,) = (_gib(one["emptyDir"]["sizeLimit"]) for one in spec["volumes"] if one["name"] == "shm")
    found = container(spec, engine)
    if engine == "vllm":
        cache, least = _kv_transfer(found)["cpu_bytes_to_use"] >> 30, shm
        assert cache < shm
    else:
        (cache,) = (int(one[15:]) for one in found["args"] if one.startswith("--hicache-size="))
        least = cache + shm
    assert least < _gib(found["resources"]["limits"]["memory"])


def test_redis_has_room_beside_its_pages(built: list[Manifest]) -> None:
    found = container(pod(built, "hicache-redis"), "redis")
    most = found["args"][found["args"].index("--maxmemory") + 1]

    assert int(most.removesuffix("gb")) == _gib(found["resources"]["limits"]["memory"]) * 3 / 4


def _ports(found: Manifest) -> set[str]:
    return {one["name"] for one in found["ports"]}


def _monitor() -> Manifest:
    text = (DEPLOY / "prometheus-operator/podmonitor.yaml").read_text(encoding="utf-8")
    found: Manifest = yaml.safe_load(text)
    return found


def _config_maps(manifests: list[Manifest]) -> dict[str, Mapping[str, str]]:
    return {one["metadata"]["name"]: one["data"] for one in manifests if "data" in one}


def _gib(text: str) -> int:
    return int(text.removesuffix("Gi"))


def _kv_transfer(found: Manifest) -> dict[str, Any]:
    arguments = found["args"]
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    extra: dict[str, Any] = config["kv_connector_extra_config"]
    return extra


# --- the configs


def test_the_adapters_accept_their_configs(engine: str, built: list[Manifest]) -> None:
    store = yaml.safe_load((DEPLOY / engine / "store.yaml").read_text(encoding="utf-8"))
    found = container(pod(built, f"hicache-{engine}"), engine)
    if engine == "vllm":
        (tier,) = complete_tiers(_kv_transfer(found))
        settings = tier_settings(tier)
        backend, port = settings.backend, settings.metrics_port
        assert settings.config == STORE
    else:
        backend, adapter, store = split_config(store)
        port = adapter.metrics_port
        assert f"--hicache-storage-backend-extra-config={STORE}" in found["args"]
    assert backend == "redis"
    assert RedisSettings.parse("redis", {**store, "password_file": __file__}).ttl_s == 86400
    assert {"name": "hicache-metrics", "containerPort": port} in found["ports"]


def test_the_doctor_reads_what_the_engine_reads(engine: str, built: list[Manifest]) -> None:
    spec = pod(built, f"hicache-{engine}")

    assert f"--hicache-storage-backend-extra-config={STORE}" in container(spec, "doctor")["args"]
    mounts = container(spec, engine)["volumeMounts"]
    assert all(one in mounts for one in container(spec, "doctor")["volumeMounts"])


def test_both_engines_have_the_same_store() -> None:
    vllm, sglang = (
        yaml.safe_load((DEPLOY / name / "store.yaml").read_text(encoding="utf-8"))
        for name in ENGINES
    )

    assert vllm == sglang["config"]


# --- the page


def _shell(text: str) -> str:
    (block,) = (one for one in code_blocks(PAGE, "sh") if text in one)
    return block


def _run_in_clone(script: str, directory: Path) -> None:
    if not (directory / "deploy").exists():
        (directory / "deploy").symlink_to(DEPLOY)
    subprocess.run([program("bash"), "-ec", script], cwd=directory, check=True)


def test_the_overlay_of_the_page_builds(tmp_path: Path) -> None:
    (overlay,) = code_blocks(PAGE, "yaml")
    clone = os.path.relpath(ROOT, tmp_path)
    text = overlay.replace("../hicache-storage", clone)
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")

    built = kustomized(tmp_path)

    assert _monitor()["metadata"]["name"] in {
        one["metadata"]["name"] for one in built if one["kind"] == "PodMonitor"
    }
    found = container(pod(built, "hicache-vllm"), "vllm")
    assert found["image"].startswith("registry.mine/")
    assert found["args"][0] == "meta-llama/Llama-3.1-8B-Instruct"
    assert {"llm"} == {one["metadata"]["namespace"] for one in built}


def test_the_rule_of_the_page_has_the_alerts(tmp_path: Path) -> None:
    _run_in_clone(_shell("kind: PrometheusRule"), tmp_path)

    rule = yaml.safe_load((tmp_path / "prometheus-rule.yaml").read_text(encoding="utf-8"))
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text(encoding="utf-8"))


def test_promtool_accepts_the_scrape_config(tmp_path: Path) -> None:
    """Debian's promtool does not know how to discover pods, so it gets targets in their place."""
    text = (DEPLOY / "prometheus/scrape.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    (scrape,) = config["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    scrape["static_configs"] = [{"targets": ["127.0.0.1:9401"]}]
    (tmp_path / "scrape.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    checked = promtool("check", "config", "--syntax-only", tmp_path / "scrape.yml")

    assert checked.returncode == 0, checked.stderr


# --- Redis, and what its clients may do


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Generator[DeployedRedis]:
    """Yield the server of the folder `vllm`, with the Secret of the page."""
    directory = tmp_path_factory.mktemp("redis")
    _run_in_clone(_shell("openssl rand"), directory)
    secret = {name: (directory / name).read_text() for name in ("password", "users.acl")}
    with DeployedRedis(directory / "server", "vllm", secret) as server:
        yield server


def _client(redis: DeployedRedis, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the probe of the container, or another command of its user."""
    found = container(pod(redis.manifests, "hicache-redis"), "redis")
    name, *words = found["livenessProbe"]["exec"]["command"]
    assert words.pop() == "ping"
    return subprocess.run(
        [program(name), "-p", str(redis.port), *words, *(arguments or ["ping"])],
        env={**os.environ, **library_path()},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_probe_answers(redis: DeployedRedis) -> None:
    assert _client(redis).stdout == "PONG\n"
    assert _client(redis).returncode == 0


@pytest.mark.parametrize("command", ["get hicache:x", "info", "acl list", "flushall"])
def test_the_user_of_the_probe_may_do_nothing_else(redis: DeployedRedis, command: str) -> None:
    refused = _client(redis, *command.split())

    assert refused.returncode
    assert "NOPERM" in refused.stderr


def _doctor(
    redis: RedisServer, secret: Mapping[str, str], directory: Path, engine: str = "vllm"
) -> int:
    """Run the init container of an engine. Return its exit code."""
    shell, *words = EngineHost(directory, engine, redis, secret).run("doctor")
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    done = subprocess.run(
        [program(shell), *words, "--page-bytes=65536"], env=environment, cwd=directory, check=False
    )
    return done.returncode


@pytest.mark.parametrize("name", ENGINES)
def test_the_doctor_lets_an_engine_start(
    redis: DeployedRedis, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the machine is fast enough is not the point, so the code may be that of a slow store."""
    assert _doctor(redis, redis.secret, tmp_path, name) == 0
    assert "redis answers" in capfd.readouterr().out


def test_a_wrong_password_keeps_an_engine_from_starting(
    redis: DeployedRedis, tmp_path: Path
) -> None:
    assert _doctor(redis, new_secret(), tmp_path) == 1


def test_a_redis_that_is_down_does_not(
    redis: DeployedRedis, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = RedisServer(tmp_path / "never-started")

    assert _doctor(down, redis.secret, tmp_path) == 0
    assert "cannot connect" in capfd.readouterr().out


# --- systemd


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*/*.service")), ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    text = re.sub(
        r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.MULTILINE
    )
    (tmp_path / unit.name).write_text(text, encoding="utf-8")

    done = subprocess.run(
        [analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_the_redis_of_the_unit_reports_that_it_is_ready(tmp_path: Path) -> None:
    unit = (DEPLOY / "redis/hicache-redis.service").read_text(encoding="utf-8")
    variables = dict(
        word.split("=", 1)
        for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
        for word in shlex.split(line)
    )
    variables |= {"PORT": str(free_port()), "CREDENTIALS_DIRECTORY": str(tmp_path)}
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], command).split()
    assert words[:2] == ["/usr/bin/redis-server", "/etc/hicache/redis.conf"]
    words[:2] = [program("redis-server"), str(DEPLOY / "redis/redis.conf")]
    _run_in_clone(_shell("openssl rand"), tmp_path)

    notify = str(tmp_path / "notify")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listener:
        listener.bind(notify)
        listener.settimeout(20)
        environment = {**os.environ, **library_path(), "NOTIFY_SOCKET": notify}
        server = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, cwd=tmp_path)
        try:
            while b"READY=1" not in listener.recv(4096):
                pass
        finally:
            server.terminate()
            server.wait(20)
