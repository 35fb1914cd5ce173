"""`adapter_params`, without LMCache."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.lmcache._settings import AdapterSettings

PARAMS: dict[str, Any] = {"backend": "redis", "config": {"url": "redis://x"}, "revision": "main"}


def test_the_backends_fields_are_under_config() -> None:
    assert {"url": "redis://x"} == AdapterSettings.of(PARAMS).backend_fields()


def test_an_empty_revision_may_be_stated() -> None:
    assert AdapterSettings.of({**PARAMS, "revision": ""}).revision == ""


def test_a_missing_revision_is_explained() -> None:
    with pytest.raises(ConfigError, match="LMCache's keys do not say of which weights"):
        AdapterSettings.of({"backend": "redis"})


@pytest.mark.parametrize("label", ["1/1", "2/2", "a/b", "0", "-1/2", "0/2/3", "00/2"])
def test_a_server_label_is_a_place_among_servers(label: str) -> None:
    with pytest.raises(ConfigError, match="server i"):
        AdapterSettings.of({**PARAMS, "server": label})


def test_secrets_are_in_no_representation() -> None:
    settings = AdapterSettings.of({**PARAMS, "config": {"url": "redis://:secret@x"}})

    assert "secret" not in repr(settings)


class TestTtls:
    def test_the_defaults_fit_lmcaches(self) -> None:
        AdapterSettings.of(PARAMS).check_ttls(call_timeout_s=10)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"store_timeout_s": 148}, "store_timeout_s.*151 s.*read TTL of 300 s"),
            ({"load_timeout_s": 298}, "load_timeout_s.*301 s.*write TTL of 600 s"),
            ({"l1_read_ttl_s": 25}, "store_timeout_s.*13 s"),
        ],
    )
    def test_deadlines_near_a_ttl_are_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            AdapterSettings.of({**PARAMS, **fields}).check_ttls(call_timeout_s=2)
