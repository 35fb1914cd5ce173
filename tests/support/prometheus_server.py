"""Debian's Prometheus, which scrapes loopback ports every fraction of a second."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from servers import ROOT, ServerProcess, program

ALERTS = ROOT / "deploy/prometheus/alerts.yml"
_INTERVAL = "250ms"


def alert_rules() -> dict[str, dict[str, Any]]:
    """Return the alerts of `deploy/prometheus/alerts.yml` by name."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def promtool(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool, and return its output."""
    return subprocess.run(
        [program("promtool"), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Prometheus(ServerProcess):
    """A Prometheus with the alerts of this project, which fire without their `for`."""

    def __init__(self, directory: Path, targets: Iterable[int]) -> None:
        super().__init__(directory)
        rules = [{**rule, "for": "0s"} for rule in alert_rules().values()]
        group = {"name": "hicache", "interval": _INTERVAL, "rules": rules}
        addresses = [f"127.0.0.1:{port}" for port in targets]
        config = {
            "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "hicache", "static_configs": [{"targets": addresses}]},
            ],
        }
        for name, content in (("rules.yml", {"groups": [group]}), ("prometheus.yml", config)):
            (directory / name).write_text(yaml.safe_dump(content), encoding="utf-8")

    def command(self) -> list[str]:
        return [
            program("prometheus"),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self._url}/-/ready", timeout=1) as answer:  # noqa: S310 - http
            return bool(answer.status == 200)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current samples of an expression, each with `metric` and `value`."""
        found = self._get("query", query=expression)
        return [each for each in found["result"] if each["value"][1] != "NaN"]

    def firing(self) -> set[tuple[str, str]]:
        """Return the name and backend of each alert that fires now."""
        alerts = self._get("alerts")["alerts"]
        return {
            (each["labels"]["alertname"], each["labels"].get("backend", ""))
            for each in alerts
            if each["state"] == "firing"
        }

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - http
            data: dict[str, Any] = json.load(answer)["data"]
        return data
