from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError, field_validator

from hicache_storage.errors import ConfigError
from hicache_storage.registry import open_storage
from hicache_storage.settings import (
    ByteSize,
    DirectoryName,
    Field,
    FileName,
    PositiveSeconds,
    SecretStr,
    Settings,
)

SECRET = "hunter2-do-not-tell"  # noqa: S105 - no real secret
UNIT = "swordfish"  # pydantic quotes the unit of a size


class Acme(Settings):
    url: str
    password: SecretStr | None = None
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    timeout_s: PositiveSeconds = 30.0
    connections: int = Field(default=4, ge=1, le=64)
    window_s: PositiveSeconds | None = None
    share: float = 0.5
    most: int | None = None
    verify: bool = True
    cluster: bool | None = None
    nested: dict[str, int] = Field(default_factory=dict)
    name: str = Field(default="abc", pattern="^[a-z]{3}$", description="three small letters")
    other_name: str = Field(default="abc", pattern="^[a-z]{3}$")

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if not url.startswith("acme://"):
            raise ValueError("Must begin with acme://HOST")
        return url


def refusal(**config: Any) -> str:
    """Return the message of `Acme` about a config with one wrong field."""
    with pytest.raises(ConfigError) as caught:
        Acme.parse("acme", {"url": "acme://host", **config})
    return str(caught.value)


def test_a_config_becomes_settings_with_defaults() -> None:
    settings = Acme.parse("acme", {"url": "acme://host", "timeout_s": 2, "capacity_nbytes": "1 GB"})

    assert ("acme://host", 2.0, 4) == (settings.url, settings.timeout_s, settings.connections)
    assert 10**9 == settings.capacity_nbytes


def test_a_pattern_is_told_in_words() -> None:
    assert "acme: name: must be three small letters" == refusal(name="ab")
    assert "acme: other_name: must be text of another form" == refusal(other_name="ab")


class Part(Settings):
    name: str = Field(pattern="^[a-z]+$", description="small letters")
    size: int = 1


class Parted(Settings):
    parts: list[Part]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "b", "size": "x"}, "parts.b.size: must be a whole number, such as 4"),
        ({"name": "b", "siz": 1}, "unknown field 'parts.b.siz'; did you mean 'size'?"),
        ({"size": 2}, "parts.1.name: this field is required"),
        ({"name": "B"}, "parts.B.name: must be small letters"),
        ({"name": f"a://{SECRET}"}, "parts.1.name: must be small letters"),
        (SECRET, "parts.1: must be an object with name, size"),
    ],
)
def test_an_error_in_a_list_has_the_name_of_its_item(part: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Parted.parse("acme", {"parts": [{"name": "a"}, part]})

    assert f"acme: {message}" == str(caught.value)


def test_settings_never_change() -> None:
    settings = Acme.parse("acme", {"url": "acme://host"})

    with pytest.raises(ValidationError, match="frozen"):
        settings.url = "acme://other"


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    assert "acme: unknown field 'timeout'; did you mean 'timeout_s'?" == refusal(timeout=3)


def test_an_unknown_field_like_no_other_lists_all() -> None:
    assert refusal(zzz=1).startswith("acme: unknown field 'zzz'; choose one of capacity_nbytes,")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^acme: url: this field is required$"):
        Acme.parse("acme", {})


def test_every_complaint_is_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        Acme.parse("acme", {"timeout_s": 0, "colour": 1})

    for complaint in ("url: this field", "timeout_s: must be", "unknown field 'colour'"):
        assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1.5),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("connections", 0),
        ("connections", 65),
        ("connections", 1.5),
        ("capacity_nbytes", 0),
        ("capacity_nbytes", -5),
    ],
)
def test_a_number_out_of_bounds_is_named_and_shown(field: str, value: float) -> None:
    assert re.fullmatch(rf"acme: {field}\b.*, not {value}", refusal(**{field: value}))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("connections", [4, 4.0, "4"]),
        ("most", [4, "4", 4.0]),
        ("timeout_s", [2.5, "2.5", "25e-1"]),
        ("window_s", [7, "7", 7.0]),
        ("share", [1, "1.0", 1.0]),
        ("verify", [False, "false", "False"]),
        ("cluster", [True, "true", "TRUE"]),
    ],
)
def test_numbers_and_flags_may_be_plain_text(field: str, values: list[Any]) -> None:
    given = {
        getattr(Acme.parse("acme", {"url": "acme://h", field: value}), field) for value in values
    }

    assert len(given) == 1
    assert Acme.parse("acme", {"url": "acme://h", "most": None}).most is None


@pytest.mark.parametrize("field", ["connections", "most", "timeout_s", "window_s", "share"])
@pytest.mark.parametrize(
    "value",
    [
        *(True, False, "true", "", " 4", "4 ", "1_0", "1,0", "٣", "0x10", "4y", "1e999", "nan"),
        *("9" * 25, "9" * 5000, "-", "1.", ".5", "1e", "inf", b"4", [4]),
        *(float("nan"), float("inf"), int("9" * 400)),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_number_is_nothing_else(field: str, value: Any) -> None:
    complaint = refusal(**{field: value})

    assert re.match(rf"acme: {field}: must be a (whole |finite )?number", complaint)
    assert len(complaint) < 200


@pytest.mark.parametrize("value", [1.5, "1.5", "1e3"])
def test_a_count_has_no_fraction_and_no_exponent(value: Any) -> None:
    assert "most: must be a whole number" in refusal(most=value)


@pytest.mark.parametrize("field", ["verify", "cluster"])
@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", "off", "1", " true", "", [True]])
def test_a_flag_is_true_or_false(field: str, value: Any) -> None:
    assert f"acme: {field}: must be true or false" in refusal(**{field: value})


@pytest.mark.parametrize(
    "config",
    [
        {"password": [SECRET]},
        {"password": {"value": SECRET}},
        {"timeout_s": SECRET},
        {"connections": SECRET},
        {"capacity_nbytes": SECRET},
        {"capacity_nbytes": f"5 {UNIT}"},
        {"url": f"https://user:{SECRET}@host"},
        {"url": [SECRET]},
        {"nested": {"key": SECRET}},
        {"nested": SECRET},
    ],
    ids=str,
)
def test_text_that_was_given_is_never_repeated(config: dict[str, Any]) -> None:
    (field,) = config
    with pytest.raises(ConfigError) as caught:
        Acme.parse("acme", {"url": "acme://host"} | config)

    assert field in str(caught.value)
    assert SECRET not in repr(caught.value)
    assert UNIT not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_secret_is_not_shown() -> None:
    settings = Acme.parse("acme", {"url": "acme://host", "password": SECRET})

    assert settings.password is not None
    assert SECRET == settings.password.get_secret_value()
    assert SECRET not in f"{settings} {settings!r} {settings.model_dump()}"


def test_settings_made_without_parse_show_no_secret_either() -> None:
    wrong: Any = [SECRET]
    with pytest.raises(ValidationError) as caught:
        Acme(url="acme://host", password=wrong)

    assert SECRET not in str(caught.value)


def test_the_message_of_a_validator_is_kept() -> None:
    with pytest.raises(ConfigError, match=r"^acme: url: must begin with acme://HOST$"):
        Acme.parse("acme", {"url": "http://host"})


def test_a_config_is_not_changed() -> None:
    config: dict[str, Any] = {"url": "acme://host", "capacity_nbytes": "1GiB"}
    Acme.parse("acme", config)

    assert {"url": "acme://host", "capacity_nbytes": "1GiB"} == config


class PathSettings(Settings):
    path: DirectoryName
    key_file: FileName | None = None


class TestHomes:
    def test_a_home_is_expanded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/op")

        found = PathSettings.parse("acme", {"path": "~/kv", "key_file": "~/k"})
        assert ("/home/op/kv", "/home/op/k") == (found.path, found.key_file)
        assert PathSettings.parse("acme", {"path": "./~/kv"}).path == "./~/kv"

    @pytest.mark.parametrize("path", ["~/kv", "~", "~nobody-here/kv", "~\0/kv"])
    def test_without_a_home_a_path_in_it_is_refused(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        without_home(monkeypatch)
        for fields in ({"path": path}, {"path": "/kv", "key_file": path}):
            with pytest.raises(
                ConfigError, match=r"^acme: .*: `~` has no meaning here: there is no"
            ):
                PathSettings.parse("acme", fields)

    @pytest.mark.parametrize(
        ("backend", "config"),
        [
            ("file", {"path": "~/kv"}),
            ("hf3fs", {"path": "~/kv"}),
            ("fsspec", {"url": "file://~/kv"}),
            ("fsspec", {"url": "~/kv"}),
            ("redis", {"url": "redis://127.0.0.1:1", "password_file": "~/password"}),
            ("s3", {"bucket": "b", "ca_file": "~/ca.pem"}),
            (
                "encrypted",
                {"backend": "memory", "keys": {"k": {"file": "~/k"}}, "current_key": "k"},
            ),
            (
                "tiered",
                {
                    "tiers": [
                        {"name": n, "backend": "file", "config": {"path": f"~/{n}"}} for n in "ab"
                    ]
                },
            ),
        ],
    )
    @pytest.mark.parametrize("read_only", ["", "read-only"])
    def test_no_store_is_made_in_a_directory_called_tilde(
        self,
        backend: str,
        config: dict[str, Any],
        read_only: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        without_home(monkeypatch)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            ConfigError, match="`~` has no meaning here: there is no home directory"
        ):
            open_storage(backend, config, read_only=bool(read_only))
        assert not [*tmp_path.iterdir()]


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user id without a name, as containers give one."""

    def unknown(_: object) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
