"""Finds the TCP endpoints in a backend's config, and replaces them with others."""

from __future__ import annotations

import copy
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "http": 80, "https": 443}
_HOST_FIELDS = ("host", "hostname", "server", "address")
_MAX_PORT = 65535
_MIN_PLAIN_PORT = 1024
"""The smallest port for a host without a dot in its name, so that "layer:3" is not an endpoint."""

_BETWEEN_URLS = re.compile(r"([,;\s]+)(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_URL = re.compile(
    r"(?P<head>(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:[^/?#\s]*@)?)(?P<hosts>[^/?#\s]*)(?P<tail>.*)",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"([,;\s]+)")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?")
_NAME = re.compile(r"(?:[A-Za-z0-9_-]+\.)*[A-Za-z0-9_-]*[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, as a config names it."""

    host: str
    """A name or an address, without brackets."""
    port: int


Swap: TypeAlias = "Callable[[Endpoint], tuple[str, int] | None]"
"""A function that returns the new address of an endpoint, or None to keep it."""


def endpoints_in(config: Mapping[str, Any]) -> list[Endpoint]:
    """Return the endpoints that `config` names, each once, in order.

    An endpoint may stand in a URL with a port (URLs of redis and http have one by default), in a
    text that is only `host:port` (or several of these), or in a field `host` (or `hostname`,
    `server`, `address`) next to a field `port`. The search goes into nested mappings and lists.
    """
    found: dict[Endpoint, None] = {}

    def note(endpoint: Endpoint) -> None:
        found[endpoint] = None

    _rewritten(config, note)
    return list(found)


def redirected(
    config: Mapping[str, Any], targets: Mapping[Endpoint, tuple[str, int]]
) -> dict[str, Any]:
    """Return a deep copy of `config` in which hosts and ports replace the keys of `targets`.

    Everything else stays byte for byte. A server's certificate does not match its new address, so
    with TLS the client must not check the host's name.
    """
    return cast("dict[str, Any]", _rewritten(config, targets.get))


def _rewritten(value: Any, swap: Swap) -> Any:
    if isinstance(value, Mapping):
        return _rewritten_mapping(cast("Mapping[object, Any]", value), swap)
    if isinstance(value, (list, tuple)):
        items = [_rewritten(item, swap) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return _rewritten_text(value, swap)
    return copy.deepcopy(value)


# --- fields --------------------------------------------------------------------------------------


def _rewritten_mapping(mapping: Mapping[object, Any], swap: Swap) -> dict[object, Any]:
    pairs = _pairs(mapping)
    done = {key for pair in pairs for key in pair}
    result = {
        key: copy.deepcopy(value) if key in done else _rewritten(value, swap)
        for key, value in mapping.items()
    }
    for host_field, port_field in pairs:
        port = mapping[port_field]
        target = swap(Endpoint(mapping[host_field].strip("[]"), int(port)))
        if target is not None:
            result[host_field] = target[0]
            result[port_field] = type(port)(target[1])
    return result


def _pairs(mapping: Mapping[object, Any]) -> list[tuple[str, str]]:
    """Return the fields of a host and its port: `host` and `port`, `redis_host` and `redis_port`."""
    found: dict[str, str] = {}
    for name in _HOST_FIELDS:
        for key, value in mapping.items():
            if isinstance(key, str) and key.lower().endswith(name) and _is_host(value):
                port_field = key[: -len(name)] + ("PORT" if key.isupper() else "port")
                if _is_port(mapping.get(port_field)):
                    found.setdefault(port_field, key)
    return [(host_field, port_field) for port_field, host_field in found.items()]


def _is_host(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return _is_address(value.strip("[]")) or _NAME.fullmatch(value) is not None


def _is_port(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return False
    return str(value).isascii() and str(value).isdecimal() and 0 < int(value) <= _MAX_PORT


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# --- texts ---------------------------------------------------------------------------------------


def _rewritten_text(text: str, swap: Swap) -> str:
    if "://" in text:
        return "".join(_rewritten_url(part, swap) for part in _BETWEEN_URLS.split(text))
    parts = _SEPARATOR.split(text)
    if all(_is_bare(part) for part in parts[::2] if part):
        return "".join(_rewritten_host(part, swap, None) for part in parts)
    return text


def _rewritten_url(url: str, swap: Swap) -> str:
    match = _URL.fullmatch(url)
    if match is None:
        return url
    default = _DEFAULT_PORTS.get(match["scheme"].lower())
    hosts = _SEPARATOR.split(match["hosts"])
    return match["head"] + "".join(_rewritten_host(h, swap, default) for h in hosts) + match["tail"]


def _rewritten_host(text: str, swap: Swap, default_port: int | None) -> str:
    """Return `text`, a host with or without a port, or the address that replaces it."""
    match = _HOST_PORT.fullmatch(text)
    port = int(match["port"] or default_port or 0) if match else 0
    if match is None or not 0 < port <= _MAX_PORT:
        return text
    target = swap(Endpoint(match["host"].strip("[]"), port))
    if target is None:
        return text
    host, port = target
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_bare(text: str) -> bool:
    """Return whether a text that is not a URL is `host:port`, and not a time, a tag or a ratio."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or not match["port"] or not 0 < int(match["port"]) <= _MAX_PORT:
        return False
    host = match["host"].strip("[]")
    if _is_address(host) or host == "localhost":
        return True
    return _NAME.fullmatch(host) is not None and (
        "." in host or int(match["port"]) >= _MIN_PLAIN_PORT
    )
