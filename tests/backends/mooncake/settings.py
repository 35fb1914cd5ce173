"""The config of `mooncake`: SGLang's fields, file and environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.mooncake.settings import parse_settings

from hicache_storage.errors import ConfigError

MASTER = {"master_server_address": "10.0.0.1:50051"}


@pytest.fixture(autouse=True)
def _no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOONCAKE_MASTER", "MOONCAKE_PROTOCOL", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4gb", 4 << 30),
        ("512MB", 512 << 20),
        ("1GiB", 1 << 30),
        (7, 7),
        ("8", 8),
        ("1.5 g", 3 << 29),
    ],
)
def test_sizes_are_read_as_sglang_reads_them(text: object, nbytes: int) -> None:
    assert parse_settings({**MASTER, "global_segment_size": text}).global_segment_size == nbytes


def test_the_environment_is_asked_where_the_config_names_no_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.2:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    found = parse_settings({"timeout_s": 2})

    assert ("10.0.0.2:1", "tcp", 2) == (
        found.master_server_address,
        found.protocol,
        found.timeout_s,
    )


def test_a_config_with_a_master_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")

    assert parse_settings(MASTER).protocol == "rdma"


def test_sglang_s_file_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mooncake.json").write_text(json.dumps({**MASTER, "protocol": "tcp"}))
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.2:1")

    assert ("10.0.0.1", 50051) == parse_settings({}).master


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"master_server_address": "nowhere"}, "master_server_address"),
        ({**MASTER, "global_segment_size": "lots"}, "global_segment_size"),
        ({**MASTER, "global_segment_size": True}, "global_segment_size"),
        ({**MASTER, "global_segment_size": "1,000gb"}, "global_segment_size"),
        ({**MASTER, "global_segment_size": "80%"}, "global_segment_size"),
        ({**MASTER, "global_segment_size": "1.2.3gb"}, "global_segment_size"),
        ({**MASTER, "global_segment_size": "9" * 400}, "global_segment_size"),
        ({**MASTER, "local_buffer_size": "1.5"}, "local_buffer_size"),
        ({"master_server_address": "host:99999"}, "master_server_address"),
        ({**MASTER, "protocol": "pigeon"}, "protocol"),
        ({**MASTER, "standalone_storage": True}, "standalone_storage"),
        ({**MASTER, "client_server_address": "h:1"}, "client_server_address"),
        ({**MASTER, "protocoll": "tcp"}, "protocoll"),
        ({}, "master_server_address"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_settings(fields)


def test_the_settings_do_not_load_the_native_client() -> None:
    code = "import sys, hicache_backends.mooncake.settings; print('mooncake.store' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed == b"False\n"
