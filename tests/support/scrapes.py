"""Reads an endpoint of metrics, as Prometheus does."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def exposition(port: int) -> str:
    """Return the text that the endpoint on a loopback port returns."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def sample(text: str, name: str, **labels: str) -> float | None:
    """Return the sum of the samples of `name` that have these labels, or None if there are none."""
    found = [
        each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    ]
    return sum(found) if found else None
