"""A wrong config is refused with the name of the field, and values are checked only once."""

from __future__ import annotations

from typing import Any

import pytest
from hicache_backends.s3 import S3Settings, S3Storage

from hicache_storage.errors import ConfigError

CONFIG = {"bucket": "pages"}
KEYS = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "sesame"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bucket": "a/b"}, "bucket"),
        ({"bucket": ""}, "bucket"),
        ({"prefix": "/a"}, "prefix"),
        ({"prefix": "a//b"}, "prefix"),
        ({"prefix": "a b"}, "prefix"),
        ({"prefix": "../a"}, "prefix"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url"),
        ({"endpoint_url": "ftp://127.0.0.1"}, "endpoint_url"),
        ({"endpoint_url": "http://user:sesame@127.0.0.1:9000"}, "endpoint_url"),
        ({"endpoint_url": "http://user:sesame\u2100@127.0.0.1:9000"}, "endpoint_url"),
        ({"endpoint_url": "http://[sesame"}, "endpoint_url"),
        ({"endpoint_url": "http://127.0.0.1:no-port"}, "endpoint_url"),
        ({"endpoint_url": "http://127.0.0.1:9000/?x=y"}, "endpoint_url"),
        ({"region": "eu west"}, "region"),
        ({"addressing_style": "dns"}, "addressing_style"),
        ({"access_key_id": "AKIDEXAMPLE"}, "secret_access_key"),
        ({"session_token": "sesame"}, "session_token"),
        ({"headers": {"x-a": "b\r\nx-c: d"}}, "headers"),
        ({"headers": {"x a": "b"}}, "headers"),
        ({"put_headers": {"Authorization": "sesame"}}, "put_headers"),
        ({"sse_kms_key_id": "alias/a"}, "sse_kms_key_id"),
        ({"fan_out": 0}, "fan_out"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"check_sum": "crc32"}, "check_sum"),
    ],
)
def test_a_wrong_field_is_named_and_no_secret_is(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        S3Storage.from_config({**CONFIG, **fields})

    assert "sesame" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "kept"), [("", ""), ("a", "a/"), ("a/", "a/"), ("team-a/kv_1.~", "team-a/kv_1.~/")]
)
def test_a_prefix_ends_with_a_slash(given: str, kept: str) -> None:
    assert S3Settings(bucket="pages", prefix=given).prefix == kept


def test_header_names_are_in_lower_case() -> None:
    settings = S3Settings(bucket="pages", headers={"X-Amz-Request-Payer": "requester"})

    assert {"x-amz-request-payer": "requester"} == settings.headers


def test_secrets_do_not_show_themselves() -> None:
    settings = S3Settings.parse("s3", {**CONFIG, **KEYS, "session_token": "sesame"})

    assert "sesame" not in repr(settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": "no-such-profile"}, "profile: .*no-such-profile"),
        ({"ca_file": "/no/such/file", "endpoint_url": "https://localhost:1"}, "ca_file: /no/such"),
    ],
)
def test_a_missing_part_of_the_configuration_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        S3Storage.from_config({**CONFIG, **KEYS, **fields})


def test_missing_credentials_name_the_fields_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    with pytest.raises(ConfigError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        S3Storage.from_config({**CONFIG, "credentials_file": str(tmp_path / "none")})
