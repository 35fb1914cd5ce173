from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hicache_backends.encrypted import EncryptedSettings, EncryptedStorage

from hicache_storage.errors import ConfigError, UnknownBackend

HEX = "ab" * 32
VALID: dict[str, Any] = {"backend": "memory", "keys": {"a": {"env": "A_KEY"}}, "current_key": "a"}


def parsed(**fields: Any) -> EncryptedSettings:
    return EncryptedSettings.parse("encrypted", {**VALID, **fields})


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", HEX)


def test_a_key_comes_from_a_variable() -> None:
    assert {"a": bytes.fromhex(HEX)} == parsed().read_keys()


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{HEX}\n")

    read = parsed(keys={"a": {"file": f"{tmp_path}/key"}}).read_keys()

    assert {"a": bytes.fromhex(HEX)} == read


@pytest.mark.parametrize("text", [HEX[:-1], HEX + "0", "no key at all", HEX[:-1] + "g"])
def test_a_text_that_is_no_key_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("A_KEY", text)

    with pytest.raises(ConfigError, match=r"keys\.a: a key has 64 hex digits") as caught:
        EncryptedStorage.from_config(VALID)

    assert text not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": {}}, "keys: "),
        ({"keys": {"a": {}}}, r"keys\.a: give either file or env"),
        ({"keys": {"a": {"env": "A", "file": "/b"}}}, r"keys\.a: give either file or env"),
        ({"keys": {"a": HEX}}, r"keys\.a: "),
        ({"keys": {"a b": {"env": "A"}}}, "keys"),
        ({"keys": {"x" * 48: {"env": "A"}}}, "keys"),
        ({"current_key": "b"}, "current_key: must be one of keys"),
        ({"name_key": "b"}, "name_key: must be one of keys"),
        ({"keys": {"a": {"env": "A"}, "b": {"env": "B"}}}, "name_key: this field is required"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"curent_key": "a"}, "did you mean 'current_key'"),
    ],
)
def test_a_wrong_field_is_named_and_no_key_is_shown(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(**fields)

    assert HEX not in str(caught.value)


@pytest.mark.parametrize("source", [{"env": "HOME"}, {"unknown": 1}])
def test_a_key_in_the_place_of_its_id_is_refused_and_not_shown(source: dict[str, Any]) -> None:
    key = "5e" * 32
    config = {"backend": "memory", "keys": {key: source}, "current_key": "a"}
    with pytest.raises(ConfigError, match="keys: the id of a key has 1 to 47") as caught:
        EncryptedSettings.parse("encrypted", config)

    assert key not in str(caught.value)


def test_the_config_of_the_backend_is_not_in_the_repr() -> None:
    assert "open sesame" not in repr(parsed(config={"password": "open sesame"}))


def test_an_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownBackend, match="did you mean 'memory'"):
        EncryptedStorage.from_config({**VALID, "backend": "memroy"})


def test_a_wrong_field_of_the_backend_is_named_by_it() -> None:
    with pytest.raises(ConfigError, match="memory: unknown field 'capacity'"):
        EncryptedStorage.from_config({**VALID, "config": {"capacity": 1}})


def test_the_time_limit_of_the_backend_is_half_of_that_of_a_call() -> None:
    with EncryptedStorage.from_config({**VALID, "timeout_s": "3s"}) as storage:
        assert vars(storage.inner)["_settings"].timeout_s == 1.5


def test_the_time_limit_belongs_beside_the_config_of_the_backend() -> None:
    with pytest.raises(ConfigError, match="config: timeout_s: set it next to config, not in it"):
        EncryptedStorage.from_config({**VALID, "config": {"timeout_s": 1}})
