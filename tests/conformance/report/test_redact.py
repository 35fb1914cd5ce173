from __future__ import annotations

import datetime as dt
import enum
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hicache_conformance.report.redact import Redactor
from hicache_conformance.run.outcomes import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, SecretBytes, SecretStr
from report_samples import check_of, record_of, rule_of

from hicache_storage.settings import Settings

SECRET = "hunter2/+ü"  # noqa: S105 - of no account


class Mode(enum.Enum):
    FAST = "fast"


class AcmeSettings(Settings):
    host: str = "h"
    key: SecretStr = SecretStr(SECRET)


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "PASSWD",
        "client_secret",
        "authToken",
        "credential",
        "aws_access_key_id",
        "API-KEY",
        "auth",
        "session",
        "requirepass",
        "privateKey",
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    redactor = Redactor.of({name: SECRET})

    assert redactor.value({name: SECRET, "host": "h"}) == {name: "***", "host": "h"}
    assert redactor.text(f"refused: {SECRET}.") == "refused: ***."


@pytest.mark.parametrize(
    "config",
    [
        {"page_tokens": 4096},
        {"session_ttl_s": 4096},
        {"author": "4096"},
        {"auth": True},
        {"bypass": "4096"},
        {"password": None},
    ],
)
def test_a_field_that_only_resembles_a_secret_is_shown(config: dict[str, Any]) -> None:
    redactor = Redactor.of(config)

    assert config == redactor.value(config)
    assert redactor.text("True, None, 4096") == "True, None, 4096"


@pytest.mark.parametrize(
    "config",
    [
        {"nodes": [{"password": SECRET}]},
        {"auth": {"basic": {"user": SECRET}}},
        {"tokens": ("a", SECRET)},
        {"a": {"b": SecretStr(SECRET)}},
        {"a": SecretBytes(SECRET.encode())},
        {"a": AcmeSettings()},
        {"url": f"redis://user:{quote(SECRET, safe='')}@host:6379/0"},
        {"url": f"redis://:{SECRET}@host"},
        {"urls": [f"redis://:{SECRET}@h1,redis://:other@h2"]},
        {"url": AnyUrl(f"redis://user:{quote(SECRET, safe='')}@host:6379/0")},
        {"dsn": f"host=h;Password={SECRET};port=1"},
        {"password": SECRET.encode()},
    ],
)
def test_a_secret_is_found_wherever_the_config_holds_it(config: dict[str, Any]) -> None:
    redactor = Redactor.of(config)

    assert redactor.text(f"{SECRET}, really") == "***, really"
    shown = json.dumps(redactor.value(config), ensure_ascii=False)
    assert SECRET not in shown
    assert quote(SECRET, safe="") not in shown


@pytest.mark.parametrize(
    "form",
    [
        quote(SECRET),
        quote(SECRET, safe=""),
        quote(SECRET, safe="").lower(),
        json.dumps(SECRET),
        repr(SECRET),
    ],
)
def test_a_secret_is_found_in_other_spellings(form: str) -> None:
    shown = Redactor.of({"password": SECRET}).text(f"GET {form} failed")

    assert shown.replace('"', "").replace("'", "") == "GET *** failed"


def test_a_secret_with_quotes_is_found_in_a_command_line() -> None:
    config = {"password": 'it\'s "so" \\ secret'}
    command = shlex.join(["run", "--config", json.dumps(config)])

    shown = Redactor.of(config).text(command)

    assert shown == """run --config '{"password": "***"}'"""


def test_a_short_secret_is_hidden_by_its_name_only() -> None:
    redactor = Redactor.of({"password": "abc"})

    assert redactor.value({"password": "abc"}) == {"password": "***"}
    assert redactor.text("abcdef") == "abcdef"
    assert redactor.text("""'{"password": "abc"}'""") == """'{"password": "***"}'"""


def test_a_harmless_word_under_a_secrets_name_stays_in_texts() -> None:
    assert Redactor.of({"auth": "None"}).text("None of them") == "None of them"


def test_a_number_is_a_secret_under_a_password_s_name() -> None:
    redactor = Redactor.of({"pin_password": 918273})

    assert redactor.value({"pin_password": 918273}) == {"pin_password": "***"}
    assert redactor.text("PIN 918273") == "PIN ***"


def test_passwords_of_others_are_hidden_in_urls_and_queries() -> None:
    shown = Redactor.of({}).text("GET http://u:pw@h/x?token=abc&page_tokens=16 failed")

    assert shown == "GET http://u:***@h/x?token=***&page_tokens=16 failed"


def test_a_port_before_a_path_is_no_password() -> None:
    text = "http://host:6379/x?mail=a@b and http://host:1/"

    assert Redactor.of({"url": text}).text(text) == text


def test_the_longer_of_two_secrets_goes_first() -> None:
    redactor = Redactor.of({"password": "abcd", "token": "abcdefgh"})

    assert redactor.text("abcdefgh abcd") == "*** ***"


def test_a_value_becomes_ready_for_json() -> None:
    value = {
        "path": Path("/a"),
        "mode": Mode.FAST,
        "text": b"abc",
        "octets": b"\xff\x00",
        "many": bytes(100),
        "set": {2, 1},
        "pair": (1, None),
        "nan": float("nan"),
        "day": dt.date(2026, 1, 2),
        "settings": AcmeSettings(),
        1: True,
    }

    shown = Redactor.of({}).value(value)

    assert shown == {
        "path": "/a",
        "mode": "fast",
        "text": "abc",
        "octets": "ff00",
        "many": "100 bytes",
        "set": [1, 2],
        "pair": [1, None],
        "nan": "nan",
        "day": "2026-01-02",
        "settings": {"host": "h", "key": "***"},
        "1": True,
    }
    json.dumps(shown, allow_nan=False)


def test_a_record_loses_the_text_of_a_store_and_keeps_that_of_the_kit() -> None:
    said = check_of(
        "KV-001",
        Outcome.FAILED,
        message="is passed",
        expected="not passed",
        got="passed",
        sequence=("login(passed)",),
        evidence={"passed": "1 passed"},
    )
    record = record_of(
        rule_of("KV-001"),
        rule_of("KV-002", Outcome.FAILED, said),
        reasons=("it can't be opened: passed",),
        command="run --password passed",
    )

    shown = Redactor.of({"password": "passed"}).record(record)

    assert shown.rules[0] == record.rules[0]
    [check] = shown.rules[1].checks
    assert (check.message, check.expected, check.got) == ("is ***", "not ***", "***")
    assert (check.sequence, check.evidence) == (("login(***)",), {"***": "1 ***"})
    assert (shown.reasons, shown.run.command) == (
        ("it can't be opened: ***",),
        "run --password ***",
    )
    assert shown.subject == record.subject


SECRETS = st.text("abcXYZ019 _-.:/@%'\"\\{}ü€", min_size=4, max_size=20)


@settings(deadline=None)  # the machine may be busy
@given(secret=SECRETS, around=st.tuples(st.text(max_size=9), st.text(max_size=9)))
def test_no_text_contains_a_secret(secret: str, around: tuple[str, str]) -> None:
    before, after = around
    redactor = Redactor.of({"password": secret})

    assert secret not in redactor.text(f"{before}{secret}{after}")
    assert secret not in redactor.text(shlex.join(["x", f"{secret}{after}"]))


@settings(deadline=None)  # the machine may be busy
@given(secret=SECRETS)
def test_redacting_twice_changes_nothing(secret: str) -> None:
    redactor = Redactor.of({"password": secret})
    once = redactor.text(f"a {secret} b password={secret}")

    assert once == redactor.text(once)
