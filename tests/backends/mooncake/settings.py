"""The config of `mooncake`: SGLang's fields, file and environment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from servers import load_mooncake

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

load_mooncake()
from hicache_backends.mooncake.settings import settings_of  # noqa: E402  # its package loads the client

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
    assert settings_of({**MASTER, "global_segment_size": text}).global_segment_size == nbytes


def test_the_environment_is_asked_where_the_config_names_no_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.2:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    found = settings_of({"timeout_s": 2})

    assert ("10.0.0.2:1", "tcp", 2) == (
        found.master_server_address,
        found.protocol,
        found.timeout_s,
    )


def test_a_config_with_a_master_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")

    assert settings_of(MASTER).protocol == "rdma"


def test_sglang_s_file_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mooncake.json").write_text(json.dumps({**MASTER, "protocol": "tcp"}))
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.2:1")

    assert ("10.0.0.1", 50051) == settings_of({}).master


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
        settings_of(fields)
