"""Removes secrets from a report, by their names and by their values.

If the config has a value under the name of a secret, this value is removed from every text. A client
may repeat it in an error message, a command line in quotes, and a URL in percent-encoding.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote, quote_plus, unquote

from pydantic import BaseModel, Secret, SecretBytes, SecretStr

if TYPE_CHECKING:
    from hicache_conformance.report.record import CheckRecord, Record

_Plain = Mapping[Any, Any] | list[Any] | str | float | bool | None

HIDDEN = "***"

_SHORTEST = 4
"""Values shorter than this are not removed from texts, because they are part of words."""
_HARMLESS = {"true", "false", "none", "null"}
_SHOWN_NBYTES = 32

_STRONG = re.compile(
    r"passw(or)?d|passphrase|requirepass|secret|credential"
    r"|(access|api|account|private|signing|encryption)key|connectionstring"
)
"""Names without separators whose values are secret."""
_WEAK = {
    "auth", "authentication", "authorization", "bearer", "cookie", "jwt", "pass", "pwd", "sas",
    "session", "sig", "signature", "token", "tokens",
}  # fmt: skip
"""Texts under names with these words are secret. Numbers are not: `page_tokens`, `session_ttl_s`."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]")
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_USERINFO = re.compile(r"""(?<=://)([^/?#\s'":@]*):(?!\d*[/?#])((?:(?![a-zA-Z]+://)[^\s'"])+)@""")
"""User and password of a URL, also with a `/` or `@` that is not encoded. A port is not a password."""
_ASSIGNED = re.compile(r"([\w.-]+)=([^&;\s'\"]+)")
"""An assignment in a query or a connection string."""
_QUOTED = re.compile(r"""(["'])([\w.-]+)\1\s*:\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""")
"""A quoted name and value, in JSON or in a printed dict."""


class Redactor:
    """A filter that removes the secrets of one config from texts. Make it with `of`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets for form in _forms(secret)}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        self._secrets = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return a redactor for the secrets in `config`. Other secrets are found by their names only."""
        return cls(
            secret
            for secret in _secrets(config, secret=False)
            if len(secret) >= _SHORTEST and secret.lower() not in _HARMLESS
        )

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        text = self._secrets.sub(HIDDEN, text)
        text = _USERINFO.sub(lambda found: f"{found[1]}:{HIDDEN}@", text)
        return _QUOTED.sub(_without_quoted, _ASSIGNED.sub(_without_assigned, text))

    def value(self, value: Any) -> Any:
        """Return `value` without secrets and ready for JSON."""
        return self._shown(value, name="")

    def record(self, record: Record) -> Record:
        """Return `record` without secrets that a store or a command line put there.

        The kit's own words stay, because a password may be the word `passed`.
        """
        rules = (
            rule.model_copy(update={"checks": tuple(map(self._check, rule.checks))})
            for rule in record.rules
        )
        run = record.run.model_copy(
            update=self._texts(command=record.run.command, selection=record.run.selection)
        )
        config = self.value(record.subject.config)
        return record.model_copy(
            update={
                "rules": tuple(rules),
                "run": run,
                "subject": record.subject.model_copy(update={"config": config}),
                **self._texts(reasons=record.reasons),
            }
        )

    def _check(self, check: CheckRecord) -> CheckRecord:
        evidence = {self.text(name): self.text(told) for name, told in check.evidence.items()}
        texts = self._texts(
            message=check.message,
            expected=check.expected,
            got=check.got,
            sequence=check.sequence,
        )
        return check.model_copy(update={"evidence": evidence, **texts})

    def _texts(self, **fields: str | tuple[str, ...]) -> dict[str, str | tuple[str, ...]]:
        return {
            name: self.text(told) if isinstance(told, str) else tuple(map(self.text, told))
            for name, told in fields.items()
        }

    def _shown(self, value: Any, *, name: str) -> Any:
        plain = _plain(value)
        if isinstance(plain, Mapping):
            return {
                self.text(str(key)): self._shown(item, name=f"{name}.{key}" if name else str(key))
                for key, item in plain.items()
            }
        if isinstance(plain, list):
            return [self._shown(item, name=name) for item in plain]
        if _is_secret(name, plain):
            return HIDDEN
        return self.text(plain) if isinstance(plain, str) else plain


def _plain(value: Any) -> _Plain:
    """Return `value` in the types of JSON, one level deep. A secret type becomes `***`."""
    result: _Plain
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        result = HIDDEN
    elif isinstance(value, enum.Enum):
        result = _plain(value.value)
    elif value is None or isinstance(value, (str, bool, int)):
        result = value
    elif isinstance(value, float):
        result = value if math.isfinite(value) else str(value)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        result = _octets(bytes(cast("Any", value)))
    elif isinstance(value, (date, time)):
        result = value.isoformat()
    elif isinstance(value, (Mapping, list)):
        result = cast("_Plain", value)
    elif isinstance(value, (set, frozenset)):
        result = sorted(cast("Any", value), key=str)
    elif isinstance(value, tuple):
        result = list(cast("Any", value))
    else:
        result = _fields(value) or str(value)
    return result


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a model or a data class, or None for other values."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return {}


def _octets(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and (text or not data):
        return text
    return data.hex() if len(data) <= _SHOWN_NBYTES else f"{len(data)} bytes"


def _is_secret(name: str, value: Any) -> bool:
    """Return True if a value of this type under this name is a secret."""
    if value is None or isinstance(value, bool):
        return False
    if _STRONG.search(re.sub(r"[^a-z]", "", name.lower())):
        return True
    words = {word.lower() for word in _WORD.findall(name)}
    return bool(words & _WEAK) and isinstance(value, str)


def _secrets(value: Any, *, secret: bool, name: str = "") -> Iterator[str]:
    """Yield every secret text inside `value`, or every text if `secret` is set."""
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        held = cast("Any", value).get_secret_value()
        yield from _secrets(held, secret=True, name=name)
        return
    plain = _plain(value)
    if isinstance(plain, Mapping):
        for key, item in plain.items():
            yield from _secrets(str(key), secret=False)
            below = f"{name}.{key}" if name else str(key)
            yield from _secrets(item, secret=secret, name=below)
    elif isinstance(plain, list):
        for item in plain:
            yield from _secrets(item, secret=secret, name=name)
    elif (secret and plain is not None) or _is_secret(name, plain):
        yield str(plain)
    if isinstance(plain, str):
        yield from _embedded(plain)


def _embedded(text: str) -> Iterator[str]:
    """Yield the secrets in a URL or a connection string, both as written and decoded."""
    found = [match[2] for match in _USERINFO.finditer(text)]
    found += [match[2] for match in _ASSIGNED.finditer(text) if _is_secret(match[1], match[2])]
    for secret in found:
        yield secret
        yield unquote(secret)


def _forms(secret: str) -> set[str]:
    """Return a secret as it looks in plain text, a URL, JSON, Python and a shell."""
    quoted = {quote(secret, safe=""), quote(secret), quote_plus(secret)}
    lower = {re.sub("%..", lambda found: found[0].lower(), form) for form in quoted}
    escaped = {
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
    }
    forms = {secret} | quoted | lower | escaped
    return forms | {form.replace("'", "'\"'\"'") for form in forms}


def _without_assigned(found: re.Match[str]) -> str:
    return f"{found[1]}={HIDDEN}" if _is_text_secret(found[1], found[2]) else found[0]


def _without_quoted(found: re.Match[str]) -> str:
    mark, name, value = found[1], found[2], found[3] or found[4] or ""
    secret = value and _is_text_secret(name, value)
    return f"{mark}{name}{mark}: {mark}{HIDDEN}{mark}" if secret else found[0]


def _is_text_secret(name: str, value: str) -> bool:
    """Return True if a text under this name is a secret. A text of digits counts as a number."""
    return _is_secret(name, 0 if _NUMBER.fullmatch(value) else value)
