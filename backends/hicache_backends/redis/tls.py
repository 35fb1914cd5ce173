"""How TLS is spoken: one context a storage, made when it is opened, so that a wrong file is named there.

Nothing is left to redis-py, whose defaults have changed: before 6.0 it did not compare host names.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# What redis-py takes in a URL. Not OCSP: it would make connections of its own, with no time limit.
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


def tls_context(
    url_options: Mapping[str, Any],
    *,
    ca_file: str | None,
    cert_file: str | None,
    key_file: str | None,
    verify: bool,
) -> ssl.SSLContext:
    """Return the context that the fields and the options of the URL describe; fields win.

    Raises:
        ValueError: Names the field or option that is wrong, and its file.
    """
    context = ssl.create_default_context()
    _verify(context, url_options, verify=verify)
    _trust(context, url_options, ca_file)
    _identify(context, url_options, cert_file, key_file)
    try:
        if "ssl_min_version" in url_options:
            context.minimum_version = ssl.TLSVersion(url_options["ssl_min_version"])
        if "ssl_ciphers" in url_options:
            context.set_ciphers(url_options["ssl_ciphers"])
    except (ValueError, ssl.SSLError):
        raise ValueError("url: ssl_min_version or ssl_ciphers: OpenSSL knows no such") from None
    return context


def _verify(context: ssl.SSLContext, url_options: Mapping[str, Any], *, verify: bool) -> None:
    wanted = url_options.get("ssl_cert_reqs", "required") if verify else "none"
    if wanted not in _VERIFY_MODES:
        raise ValueError("url: ssl_cert_reqs must be none, optional or required")
    compares_names = wanted != "none" and url_options.get("ssl_check_hostname") is not False
    context.check_hostname = compares_names  # in this order: OpenSSL refuses the other
    context.verify_mode = _VERIFY_MODES[wanted]
    for flag in url_options.get("ssl_include_verify_flags", ()):
        context.verify_flags |= flag
    for flag in url_options.get("ssl_exclude_verify_flags", ()):
        context.verify_flags &= ~flag


def _trust(context: ssl.SSLContext, url_options: Mapping[str, Any], ca_file: str | None) -> None:
    """Trust authorities beside those of the system."""
    field = "tls_ca_file" if ca_file else "url: ssl_ca_certs"
    path = ca_file or url_options.get("ssl_ca_certs")
    directory, data = url_options.get("ssl_ca_path"), url_options.get("ssl_ca_data")
    if path:
        _must_be_readable(field, path)
        try:
            context.load_verify_locations(cafile=path)
        except ssl.SSLError:
            raise ValueError(f"{field}: {path!r} holds no certificate in PEM form") from None
    if directory or data:
        try:
            context.load_verify_locations(capath=directory, cadata=data)
        except (OSError, ValueError):
            raise ValueError("url: ssl_ca_path or ssl_ca_data: no certificates there") from None


def _identify(
    context: ssl.SSLContext,
    url_options: Mapping[str, Any],
    cert_file: str | None,
    key_file: str | None,
) -> None:
    """Show the server a certificate, if there is one."""
    certificate = cert_file or url_options.get("ssl_certfile")
    key = key_file or url_options.get("ssl_keyfile")
    if certificate is None:
        if key is not None:
            raise ValueError("tls_key_file: needs tls_cert_file")
        return
    _must_be_readable("tls_cert_file", certificate)
    if key is not None:
        _must_be_readable("tls_key_file", key)
    try:
        # Never without a password: OpenSSL would ask the terminal for it.
        context.load_cert_chain(certificate, key, url_options.get("ssl_password", ""))
    except ssl.SSLError:
        raise ValueError(
            f"tls_cert_file: {certificate!r} and its key are no pair in PEM form, or the key has"
            " another password"
        ) from None


def _must_be_readable(field: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        raise ValueError(f"{field}: {path!r} cannot be read: {reason}") from None
