"""Answers of Redis: listings, INFO, the map of a cluster, redirections, and the places of `hf3fs`.

hiredis parses each of them, as in the connections. No answer raises an undocumented error, and
no listing contains a name that is not a page hash.
"""

from __future__ import annotations

from typing import Any

import hiredis
from fuzz.choices import Choices
from hicache_backends.hf3fs.index.redis_reader import place_of
from hicache_backends.redis.access import Access, Address
from hicache_backends.redis.cluster import Cluster
from hicache_backends.redis.index import _items, _parse_length, _parse_scan
from hicache_backends.redis.layout import SpaceKeys
from hicache_backends.redis.replies import MALFORMED, ErrorReply, Refused, WrongReply
from hicache_backends.redis.server_pool import ServerFacts, ServerPools
from pages import hash_of, space

from hicache_storage.backend_support.manifest import decode_manifest, encode_manifest
from hicache_storage.keys import check_page_hashes

_SPACE = space()
_KEYS = SpaceKeys("hicache:", _SPACE.id)
_HASH = hash_of(1)
_REFUSALS = (Refused, WrongReply, ConnectionError)


def _bulk(*items: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(item), item) for item in items)


_MANIFEST = encode_manifest(_SPACE)
_PLACE = b"12 " + b"ab" * 24

SEEDS = (
    b"",
    b"\0*2\r\n"
    + _bulk(b"0")
    + b"*4\r\n"
    + _bulk(_HASH.encode(), b"1", _HASH[:32].encode(), b"inf"),
    b"\1*2\r\n" + _bulk(b"7") + b"*1\r\n" + _bulk(_KEYS.page(_HASH)),
    b"\2:4096\r\n",
    b"\2-WRONGTYPE no\r\n",
    b"\3*1\r\n" + _bulk(_MANIFEST),
    b"\4" + _bulk(b"maxmemory_policy:noeviction\r\nevicted_keys:0\r\ncluster_enabled:1\r\n"),
    b"\5*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n" + _bulk(b"127.0.0.1") + b":7000\r\n" + _bulk(b"id"),
    b"\6-ASK 3999 127.0.0.1:6381\r\n",
    b"\6-MOVED 3999 :6381\r\n",
    b"\7" + _bulk(_PLACE),
)
TOKENS = (
    *(b"\r\n", b"*2\r\n", b"$-1\r\n", b":0\r\n", b"-ASK ", b"$0\r\n\r\n", b"evicted_keys:", b"0"),
    *(
        _HASH.encode(),
        _HASH[:33].encode(),
        _KEYS.page(_HASH),
        _PLACE,
        b"16384",
        b"?",
        b"volatile-lru",
    ),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.integer(0, 7)
    reply = _parsed(choices.rest())
    if reply is _UNPARSED:
        return
    try:
        _CHECKS[kind](reply)
    except _REFUSALS:
        return


_UNPARSED = object()


def _parsed(data: bytes) -> Any:
    """Return the reply that the bytes encode, as a connection returns it."""
    reader = hiredis.Reader()
    reader.feed(data)
    try:
        reply = reader.gets()
    except (hiredis.ProtocolError, *MALFORMED):
        return _UNPARSED
    if isinstance(reply, hiredis.ReplyError):
        return ErrorReply.from_line(str(reply))
    return _UNPARSED if reply is False else reply


def _members(reply: Any) -> None:
    cursor, found = _parse_scan(reply)
    index = _KEYS.index(_HASH[:2])
    listed = [one for one in (_KEYS.member(index, member) for member in found[::2]) if one]
    check_page_hashes(listed)
    assert all(one[:2] == _HASH[:2] for one in listed)
    assert isinstance(cursor, bytes)


def _walked(reply: Any) -> None:
    _, found = _parse_scan(reply)
    for key in found:
        page_hash = _KEYS.page_hash(key)
        if page_hash is not None:
            check_page_hashes([page_hash])
            assert key == _KEYS.page(page_hash)


def _length(reply: Any) -> None:
    length = _parse_length(reply)
    assert length is None or isinstance(length, int)


def _manifests(reply: Any) -> None:
    for each in _items(reply):
        found = decode_manifest(each)
        assert found is None or found == decode_manifest(encode_manifest(found))


def _facts(reply: Any) -> None:
    info = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    facts = ServerFacts.parse(info)
    assert facts.evicted_keys >= 0
    assert not (facts.may_evict_anything and facts.has_whole_indices)


def _slots(reply: Any) -> None:
    pools = ServerPools(Access({}, None), 1)
    cluster = Cluster(pools, Address("seed", 1))
    try:
        owners = cluster._parse(reply, "asked")
    except MALFORMED:
        return
    assert len(owners) == 16384
    assert all(owner is None or 0 < owner.address.port < 65536 for owner in set(owners))


def _redirected(reply: Any) -> None:
    if not isinstance(reply, ErrorReply):
        return
    try:
        target = reply.target("asked")
    except ValueError:
        return
    assert target.host
    assert 0 < target.port < 65536


def _slot_place(reply: Any) -> None:
    if not isinstance(reply, bytes):
        return
    try:
        place = place_of(reply)
    except ValueError:
        return
    assert 0 <= place.slot
    assert place == place_of(b"%d %b" % (place.slot, place.stamp.hex().encode()))


_CHECKS = (_members, _walked, _length, _manifests, _facts, _slots, _redirected, _slot_place)
