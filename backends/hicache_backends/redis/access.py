"""How to reach a server: its address, credentials and TLS context.

A storage makes one TLS context when it is opened, so that a wrong file is reported at that time. The
context does not depend on redis-py's defaults, which have changed: before 6.0 redis-py did not compare
host names.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT = 6379
_MAX_PORT = 65535

# redis-py accepts these options in a URL. We leave OCSP out, because it opens connections without a
# time limit.
URL_OPTIONS = frozenset(
    {
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_password",
        "ssl_cert_reqs",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_ca_data",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
        "ssl_include_verify_flags",
        "ssl_exclude_verify_flags",
    }
)
_VERIFY_MODES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's host and port, or the path of its unix socket."""

    host: str = "localhost"
    port: int = PORT
    path: str | None = None

    @classmethod
    def parse(cls, text: str, *, default_host: str = "") -> Address:
        """Parse `host:port`. `:port` means a port of `default_host`.

        Raises:
            ValueError: `text` has another form.
        """
        host, _, port = text.rpartition(":")
        host = host.strip("[]") or default_host
        digits = port.isascii() and port.isdecimal() and len(port) <= len(str(_MAX_PORT))
        if not host or not digits or not 0 < int(port) <= _MAX_PORT:
            raise ValueError("must be host:port")
        return cls(host, int(port))

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Access:
    """Everything that is needed to open a connection, except the address and the deadline."""

    options: dict[str, Any] = field(repr=False)
    """Options for redis-py, which sends AUTH, SELECT and CLIENT SETNAME. A new connection uses those
    that are set when it is made."""
    context: ssl.SSLContext | None
    """The TLS context, or None without TLS."""
    is_read_only: bool = False
    """True: ask the server not to count reads as uses."""


def tls_context(
    url_options: Mapping[str, Any],
    *,
    ca_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    verify: bool,
) -> ssl.SSLContext:
    """Return the context that the fields and the URL's options describe. Fields take precedence.

    Raises:
        ValueError: The message names the wrong field or option, and its file.
    """
    context = ssl.create_default_context()
    _set_verification(context, url_options, verify=verify)
    _load_authorities(context, url_options, ca_file)
    _load_certificate(context, url_options, cert_file, key_file)
    try:
        if "ssl_min_version" in url_options:
            context.minimum_version = ssl.TLSVersion(url_options["ssl_min_version"])
        if "ssl_ciphers" in url_options:
            context.set_ciphers(url_options["ssl_ciphers"])
    except (ValueError, ssl.SSLError):
        raise ValueError(
            "url: ssl_min_version or ssl_ciphers: OpenSSL does not know this value"
        ) from None
    return context


def _set_verification(
    context: ssl.SSLContext, url_options: Mapping[str, Any], *, verify: bool
) -> None:
    mode = url_options.get("ssl_cert_reqs", "required") if verify else "none"
    if mode not in _VERIFY_MODES:
        raise ValueError("url: ssl_cert_reqs must be none, optional or required")
    compares_names = mode != "none" and url_options.get("ssl_check_hostname") is not False
    context.check_hostname = compares_names  # OpenSSL refuses the opposite order
    context.verify_mode = _VERIFY_MODES[mode]
    for flag in url_options.get("ssl_include_verify_flags", ()):
        context.verify_flags |= flag
    for flag in url_options.get("ssl_exclude_verify_flags", ()):
        context.verify_flags &= ~flag


def _load_authorities(
    context: ssl.SSLContext, url_options: Mapping[str, Any], ca_file: str | None
) -> None:
    """Add the configured certificate authorities to the system's."""
    name = "tls_ca_file" if ca_file else "url: ssl_ca_certs"
    path = ca_file or url_options.get("ssl_ca_certs")
    directory, data = url_options.get("ssl_ca_path"), url_options.get("ssl_ca_data")
    if path:
        _check_readable(name, path)
        try:
            context.load_verify_locations(cafile=path)
        except ssl.SSLError:
            raise ValueError(f"{name}: {path!r} holds no certificate in PEM form") from None
    if directory or data:
        try:
            context.load_verify_locations(capath=directory, cadata=data)
        except (OSError, ValueError):
            raise ValueError("url: ssl_ca_path or ssl_ca_data: there are no certificates") from None


def _load_certificate(
    context: ssl.SSLContext,
    url_options: Mapping[str, Any],
    cert_file: str | None,
    key_file: str | None,
) -> None:
    """Load the client's certificate and key, if they are configured."""
    certificate = cert_file or url_options.get("ssl_certfile")
    key = key_file or url_options.get("ssl_keyfile")
    if certificate is None:
        if key is not None:
            raise ValueError("tls_key_file: needs tls_cert_file")
        return
    _check_readable("tls_cert_file", certificate)
    if key is not None:
        _check_readable("tls_key_file", key)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, url_options.get("ssl_password", ""))
    except ssl.SSLError:
        raise ValueError(
            f"tls_cert_file: {certificate!r} and its key are not a pair in PEM form, or the key"
            " has another password"
        ) from None


def _check_readable(name: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a path"
        raise ValueError(f"{name}: {path!r} cannot be read: {reason}") from None
