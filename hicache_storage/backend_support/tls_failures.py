"""Say why TLS with a server failed, and what an operator should do about it."""

from __future__ import annotations

import ssl

from hicache_storage.errors import StorageUnavailable

_PLAIN_SERVER = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"})
_NOT_YET_VALID, _EXPIRED = 9, 10
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
_OTHER_NAME = frozenset({62, 64})
"""Values of `SSLCertVerificationError.verify_code`, as in OpenSSL's x509_vfy.h."""


def tls_failure(
    address: object, error: ssl.SSLError, *, authority_field: str, plain_scheme: str
) -> StorageUnavailable:
    """Return the error for a server with which TLS failed, with advice.

    `authority_field` is the field of the config that names a file of authorities, and `plain_scheme` the
    beginning of a URL without TLS.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate of {address} is refused: {error.verify_message}"
        return StorageUnavailable(text, advice=_certificate_advice(error, authority_field))
    text = f"the TLS handshake with {address} failed: {error.reason or error}"
    if error.reason in _PLAIN_SERVER:
        hint = f"The server does not use TLS on this port: the scheme must be {plain_scheme}"
        return StorageUnavailable(f"{text}. {hint}", advice="")
    return StorageUnavailable(
        text, advice="compare the TLS settings of the server with those of the config"
    )


def _certificate_advice(error: ssl.SSLCertVerificationError, authority_field: str) -> str:
    code = error.verify_code
    if code in _UNKNOWN_AUTHORITY:
        return f"name the file with the authority that signed it in {authority_field}"
    if code in _OTHER_NAME:
        return "name the server by a host that its certificate has, or give it another certificate"
    if code == _EXPIRED:
        return "renew the server's certificate, or correct this machine's clock"
    if code == _NOT_YET_VALID:
        return "correct the clock of this machine, or of the one that made the certificate"
    return "give the server a certificate that this machine accepts"
