"""Signatures are equal to botocore's, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hicache_backends.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Keys, Signer
from hypothesis import given, settings
from hypothesis import strategies as st

HOST = "pages.s3.eu-west-1.amazonaws.com"
HEX = st.text("0123456789abcdef", min_size=32, max_size=64)
HEADERS = st.dictionaries(
    st.sampled_from(["if-none-match", "x-amz-storage-class", "x-amz-tagging", "content-md5"]),
    st.text("abcXYZ019=&*/+", min_size=1, max_size=20),
)


def head_of(signer: Signer, method: str, path: str, **options: Any) -> dict[str, str]:
    headers: dict[str, str] = options.pop("headers", {})
    lines = signer.head(method, path, headers, **options).decode().split("\r\n")[1:-2]
    return dict(line.split(": ", 1) for line in lines)


def signed_by_botocore(method: str, path: str, query: str, sent: dict[str, str], keys: Keys) -> str:
    """Return botocore's header for the same request at the same time."""
    plain = {
        name: value
        for name, value in sent.items()
        if name not in ("host", "authorization", "x-amz-security-token")
    }
    request = AWSRequest(method, f"https://{HOST}{path}?{query}".rstrip("?"), headers=plain)
    auth: Any = S3SigV4Auth(
        Credentials(keys.access_key, keys.secret_key, keys.token), "s3", "eu-west-1"
    )
    request.context["timestamp"] = sent["x-amz-date"]
    if keys.token:
        request.headers["X-Amz-Security-Token"] = keys.token
    canonical = auth.canonical_request(request)
    to_sign = auth.string_to_sign(request, canonical)
    return str(
        f"AWS4-HMAC-SHA256 Credential={auth.scope(request)},"
        f" SignedHeaders={auth.signed_headers(auth.headers_to_sign(request))},"
        f" Signature={auth.signature(to_sign, request)}"
    )


@settings(deadline=None)  # The machine may be busy.
@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    name=HEX,
    headers=HEADERS,
    token=st.none() | st.text("abc/+=", min_size=1, max_size=40),
    payload=st.sampled_from([UNSIGNED_PAYLOAD, EMPTY_SHA256]),
)
def test_an_object_s_request_is_signed_as_botocore_signs_it(
    method: str, name: str, headers: dict[str, str], token: str | None, payload: str
) -> None:
    keys = Keys("AKIDEXAMPLE", "sesame/sesame", token)
    path = f"/some-prefix_1.~/{name}/{name[:2]}/{name}"

    sent = head_of(
        Signer(HOST, "eu-west-1"), method, path, headers=headers, keys=keys, payload_sha256=payload
    )

    assert signed_by_botocore(method, path, "", sent, keys) == sent["authorization"]


@pytest.mark.parametrize(
    "query",
    [
        "delete",
        "list-type=2&prefix=a%2Fb%2F&encoding-type=url",
        "list-type=2&continuation-token=1ueGcxLPRx1Tr%2FXYExHnhbYLgveDs2J%2Fwm36Hy4vbOwM%3D&prefix=",
    ],
)
def test_a_query_is_signed_as_botocore_signs_it(query: str) -> None:
    keys = Keys("AKIDEXAMPLE", "sesame/sesame")

    sent = head_of(Signer(HOST, "eu-west-1"), "POST", "/", query=query, keys=keys)

    assert signed_by_botocore("POST", "/", query, sent, keys) == sent["authorization"]


def test_another_secret_makes_another_signature() -> None:
    signer = Signer(HOST, "eu-west-1")

    first, second = (
        head_of(signer, "GET", "/page", keys=Keys("AKIDEXAMPLE", secret))["authorization"]
        for secret in ("sesame", "another")
    )

    assert first != second


def test_nothing_is_signed_without_keys() -> None:
    sent = head_of(Signer(HOST, "eu-west-1"), "GET", "/page", keys=None)

    assert {"host": HOST} == sent


def test_keys_do_not_show_themselves() -> None:
    assert "sesame" not in repr(Keys("AKIDEXAMPLE", "sesame", "sesame-token"))
