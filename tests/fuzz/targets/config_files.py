"""Configs as JSON, TOML and YAML: a ConfigError that shows no value, or fields with finite numbers."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from fuzz.choices import CANARY, Choices
from fuzz.scratch import directory, write

from hicache_storage.config import load_extra_config
from hicache_storage.errors import ConfigError

_JSON = b'{"path": "/kv", "capacity_nbytes": "1GiB", "n": [1, 2.5, null, true], "o": {"a": "b"}}'
_YAML = (
    b"path: /kv\ncapacity: 1GiB\nlist: [1, 2.5, ~, yes]\nat: 2001-12-14t21:59:43.10-05:00\n"
    b"base: &base {a: 1}\nother: {<<: *base, b: 0x1f}\nblob: !!binary aGk=\nset: !!set {a, b}\n"
)
_TOML = b'path = "/kv"\nn = 1_000\nf = 1e6\n[table]\nat = 1979-05-27T07:32:00Z\nlist = [1, 2]\n'
_SUFFIXES = ("", ".json", ".toml", ".yaml", ".yml", ".txt")

SEEDS = (
    b"",
    *(bytes([n]) + text for n, text in enumerate((_JSON, _JSON, _TOML, _YAML, _YAML, _JSON))),
    *(bytes([n]) + b"[" * nested for n, nested in ((0, 2000), (3, 300))),
    b'\0{"a": 1, "a": 2}',
    b"\0" + b'{"a": ' + b"9" * 200 + b"}",
    b'\0{"a": 1e999}',
    b"\0@~nobody-here.json",
    b"\3a: &a [*a]",
    b"\3{1: 2, [3]: 4}",
)
TOKENS = (
    *(b'"a": ', b"1e999", b"NaN", b"-Infinity", b'"\\ud800"', b"9" * 101, b"null", b"[[", b"{"),
    *(
        b"!!int ",
        b"!!float ",
        b"!!bool ",
        b"!!timestamp ",
        b"!!map ",
        b"!!set ",
        b"!!omap ",
        b"!!seq ",
    ),
    *(
        b"!!binary ",
        b"!!null ",
        b'""',
        b"&a ",
        b"*a",
        b"<<: ",
        b"? ",
        b"- ",
        b": ",
        b".inf",
        b".nan",
    ),
    *(b"2001-99-99", b"0x", b"0o", b"1:60", b"---\n", b"%YAML 1.1", b"!x ", b"|\n ", b"~", b"\0"),
    *(b"[a.b]\n", b'"""', b"'''", b"inf", b"25:00:00", b"1979-13-01", b"= ", b"\n", b"\r"),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    suffix = choices.pick(_SUFFIXES)
    content = choices.rest()
    if suffix:
        path = f"{directory('configs')}/config{suffix}"
        write(path, content.replace(b"SECRET", CANARY.encode()))
        text = f"@{path}"
    else:
        text = content.decode("utf-8", "surrogateescape")
    try:
        fields = load_extra_config(text, where="--flag")
    except ConfigError as error:
        assert "--flag" in str(error)
        return

    assert all(isinstance(name, str) for name in fields)
    _check_finite(fields)
    if suffix in ("", ".json"):
        assert fields == load_extra_config(json.dumps(fields))


def _check_finite(value: Any, depth: int = 0) -> None:
    assert not isinstance(value, float) or math.isfinite(value)
    if depth > 5:
        return
    if isinstance(value, dict):
        fields: dict[Any, Any] = cast("Any", value)
        for item in fields.values():
            _check_finite(item, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        items: list[Any] = cast("Any", value)
        for item in items:
            _check_finite(item, depth + 1)
