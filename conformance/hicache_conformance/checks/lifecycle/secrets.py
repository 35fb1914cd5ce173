"""KV-303: a storage shows the secrets of its config nowhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hicache_conformance.checks import check
from hicache_conformance.checks.lifecycle.configs import accepts, must_refuse, refusal
from hicache_conformance.run.outcomes import NotDeclared, Violation
from hicache_conformance.scenarios.fault_path import without_server
from hicache_conformance.scenarios.lifecycle_actors import receive_result, small_space
from hicache_conformance.tools.network.proxy import endpoints_in
from hicache_conformance.tools.observation.leaks import Outputs, chain_text, collect_outputs
from hicache_conformance.tools.processes.child import Child
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_conformance.case.case import Case

_CANARY = "canary-7gQ2vX9pLw"
_MIN_SECRET_CHARS = 6
"""The kit looks everywhere for secrets of at least this length. A shorter one may occur for other
reasons, so the kit looks for it only in a URL and after the name of a secret.
"""
_SECRET_NAMES = ("password", "secret", "token", "api_key", "secret_key", "secret_access_key")
_NO_SECRETS = (
    "the config holds no secret, and the store takes none under the names"
    f" {', '.join(_SECRET_NAMES)} or in a URL"
)
_IS_SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|token|credential|(api|private)_?key", re.IGNORECASE
)
_IS_NO_SECRET = re.compile(r"_(id|name|path|file|url|type)$", re.IGNORECASE)
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][\w+.-]*://)(?:[^/?#\s@]*@)?(?P<rest>[^/?#\s]+.*)", re.DOTALL
)
_URL_PASSWORD = re.compile(r"://[^/?#\s@:]*:(?P<password>[^/?#\s@]+)@")


@check("KV-303")
def unknown_secrets_are_not_repeated(case: Case) -> None:
    """If an unknown field holds a secret, the ConfigError names the field and not the secret."""
    for name in _SECRET_NAMES:
        misspelt = f"{name}_conformance"
        config = {**case.config, misspelt: _CANARY}
        must_refuse(case, config, misspelt, "an unknown field that holds a secret")
        _must_not_repeat(refusal(case, config), misspelt, "an unknown field")


@check("KV-303")
def wrong_values_are_not_repeated(case: Case) -> None:
    """If a field that holds a secret has a wrong value, the ConfigError does not repeat it."""
    held = [name for name, value in _texts(case.config) if _may_be_secret(name, value)]
    names = dict.fromkeys([*held, *_accepted_names(case)])
    if not names:
        raise NotDeclared(_NO_SECRETS)
    for name in names:
        for wrong in ({"value": _CANARY}, [_CANARY]):
            _must_not_repeat(refusal(case, {**case.config, name: wrong}), name, "a wrong value")


@check("KV-303")
def a_broken_url_is_not_repeated(case: Case) -> None:
    """If a URL has a password and an invalid port, the ConfigError does not repeat the password."""
    urls = list(_urls(case.config))
    if not urls:
        raise NotDeclared("the config holds no URL of a server")
    for name, url in urls:
        broken = f"{url['scheme']}user:{_CANARY}@127.0.0.1:no-port/0"
        error = refusal(case, {**case.config, name: broken})
        _must_not_repeat(error, name, "a URL with a wrong port")
        if error is not None and not isinstance(error, ConfigError):
            raise Violation(
                f"from_config raised {type(error).__name__} for a URL whose port is not a number",
                "a ConfigError that names the field",
                type(error).__name__,
                (f"from_config({{..., {name!r}: 'scheme://user:***@127.0.0.1:no-port/0'}})",),
            )


@check("KV-303")
def secrets_are_shown_nowhere(case: Case) -> None:
    """No message, `repr`, log record or print shows a secret of the config, at any log level."""
    configs = list(_configs_with_secrets(case))
    if not configs:
        raise NotDeclared(_NO_SECRETS)
    short = {name for _, held in configs for name in held if len(held[name]) < _MIN_SECRET_CHARS}
    if short:
        case.evidence["secrets that are too short to be looked for everywhere"] = ", ".join(short)
    for config, secrets in configs:
        outputs = _outputs_of(case, config)
        for where, text in outputs.items():
            found = [name for name, secret in secrets.items() if _occurs(secret, text)]
            if found:
                raise Violation(
                    f"{where} shows the secret of {found[0]!r}",
                    "*** or nothing in its place: keep secrets in pydantic's SecretStr",
                    _around(secrets[found[0]], text),
                    (f"from_config({{..., {found[0]!r}: '***'}})", "use, close"),
                )


def _configs_with_secrets(case: Case) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield configs that open, each with its secrets by field name."""
    own = {name: value for name, value in _texts(case.config) if _may_be_secret(name, value)}
    for name, value in _texts(case.config):
        in_url = _URL_PASSWORD.search(value)
        if in_url:
            own[name] = in_url["password"]
    if own:
        yield case.config, own
    added = {name: _CANARY for name in _accepted_names(case) if name not in case.config}
    if added:
        yield {**case.config, **added}, added
    for name, url in _urls(case.config):
        if name not in own:
            with_userinfo = {name: f"{url['scheme']}user:{_CANARY}@{url['rest']}"}
            if accepts(case, with_userinfo):
                yield {**case.config, **with_userinfo}, {name: _CANARY}


def _outputs_of(case: Case, config: dict[str, Any]) -> Outputs:
    wrong: dict[str, Mapping[str, Any]] = {
        "an unknown field": {**config, "conformance_no_such_field": 1}
    }
    elsewhere = without_server(config)
    if elsewhere is not None:
        short = {"timeout_s": 1.0} if accepts(case, {"timeout_s": 1.0}) else {}
        wrong["a server that is not there"] = {**elsewhere, **short}
    with Child(
        case.subject.storage_class, config, collect_outputs, small_space(case), wrong
    ) as child:
        outputs: Outputs = receive_result(child)
        return outputs


def _must_not_repeat(error: Exception | None, name: str, what: str) -> None:
    text = chain_text(error) if error is not None else ""
    if _CANARY in text:
        raise Violation(
            f"the {type(error).__name__} for {what} repeats what was given for {name!r}",
            "the name of the field without its value, which may be a password",
            _around(_CANARY, text),
            (f"from_config({{..., {name!r}: '***'}})",),
        )


def _accepted_names(case: Case) -> list[str]:
    """Return the usual names of secrets, such as `password`, that the store accepts as fields."""
    return [name for name in _SECRET_NAMES if accepts(case, {name: _CANARY})]


def _urls(config: Mapping[str, Any]) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the fields that hold the URL of a server, with the parts of the URL."""
    for name, value in _texts(config):
        url = _URL.fullmatch(value)
        if url and endpoints_in({name: value}):
            yield name, url


def _texts(config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [(name, value) for name, value in config.items() if isinstance(value, str)]


def _may_be_secret(name: str, value: str) -> bool:
    is_named_so = _IS_SECRET.search(name) and not _IS_NO_SECRET.search(name)
    return bool(is_named_so) and bool(value)


def _occurs(secret: str, text: str) -> bool:
    return _pattern(secret).search(text) is not None


def _pattern(secret: str) -> re.Pattern[str]:
    """Return a pattern for text that shows the secret. The last group of a match is the secret."""
    forms = "|".join(re.escape(one) for one in dict.fromkeys([secret, quote(secret, safe="")]))
    if len(secret) >= _MIN_SECRET_CHARS:
        return re.compile(f"({forms})")
    behind = r"://[^/?#\s@:]*:|(?:" + _IS_SECRET.pattern + r""")['"]?\s*[:=]\s*b?['"]?"""
    return re.compile(rf"(?:{behind})({forms})(?!\w)", re.IGNORECASE)


def _around(secret: str, text: str) -> str:
    """Return the line that shows the secret, with *** in its place."""
    pattern = _pattern(secret)
    line = next(line for line in reversed(text.splitlines()) if pattern.search(line))
    hidden = pattern.sub(lambda found: found[0].removesuffix(found[found.re.groups]) + "***", line)
    return hidden.strip()[:300]
