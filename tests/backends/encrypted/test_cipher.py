from __future__ import annotations

import hashlib

import pytest
from hicache_backends.encrypted.cipher import PageKey, derive, random_nonces, seal, unseal

from hicache_storage.page import Page

NONCE = b"ABCDEFGHIJKLMNOPQRSTUVWX"
TEXT = b"XAES-256-GCM"


def sealed(key: bytes, nonce: bytes, text: bytes, about: bytes) -> bytes:
    """Return ciphertext and tag."""
    target = memoryview(bytearray(len(text)))
    (message,) = PageKey(key).message_keys([nonce])
    tag = seal(message, about, Page(text), target)
    return bytes(target) + tag


@pytest.mark.parametrize(
    ("key", "about", "expected"),
    [
        (b"\1" * 32, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (
            b"\3" * 32,
            b"c2sp.org/XAES-256-GCM",
            "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d",
        ),
    ],
)
def test_the_vectors_of_the_specification(key: bytes, about: bytes, expected: str) -> None:
    assert expected == sealed(key, NONCE, TEXT, about).hex()


def test_the_accumulated_vectors_of_the_specification() -> None:
    """10,000 messages of a deterministic generator encrypt to texts with the specification's hash."""
    stream = hashlib.shake_128(b"").digest(10_000 * (32 + 24 + 2 + 2 * 255))
    place = 0

    def draw(nbytes: int) -> bytes:
        nonlocal place
        place += nbytes
        return stream[place - nbytes : place]

    results = hashlib.shake_128()
    for _ in range(10_000):
        key, nonce = draw(32), draw(24)
        text = draw(draw(1)[0])
        about = draw(draw(1)[0])
        results.update(sealed(key, nonce, text, about))

    expected = "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"
    assert expected == results.hexdigest(32)


def test_segments_are_one_message() -> None:
    (message,) = PageKey(b"k" * 32).message_keys([NONCE])
    target, parts = memoryview(bytearray(12)), Page(TEXT[:1], TEXT[1:])
    whole = sealed(b"k" * 32, NONCE, TEXT, b"")

    tag = seal(message, b"", parts, target)
    first, second = bytearray(7), bytearray(5)

    assert whole == bytes(target) + tag
    assert unseal(message, b"", tag, target, Page(first, second))
    assert TEXT == bytes(first + second)


def _flipped(data: bytes) -> bytes:
    return bytes((data[0] ^ 1,)) + data[1:]


@pytest.mark.parametrize("changed", range(3), ids=["text", "tag", "about"])
def test_a_changed_message_does_not_open(changed: int) -> None:
    (message,) = PageKey(b"k" * 32).message_keys([NONCE])
    data = sealed(b"k" * 32, NONCE, TEXT, b"about")
    parts = [data[:-16], data[-16:], b"about"]
    parts[changed] = _flipped(parts[changed])
    text, tag, about = parts

    assert not unseal(message, about, tag, memoryview(text), Page(bytearray(12)))


def test_the_keys_of_a_batch_are_those_of_its_messages_alone() -> None:
    key, nonces = PageKey(b"k" * 32), random_nonces(3)

    assert key.message_keys(nonces) == [key.message_keys([nonce])[0] for nonce in nonces]


def test_nonces_are_all_different() -> None:
    assert len(set(random_nonces(10_000))) == 10_000


def test_keys_of_different_purposes_differ() -> None:
    assert derive(b"k" * 32, b"pages", 32) != derive(b"k" * 32, b"page names", 64)[:32]
