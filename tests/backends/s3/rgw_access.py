"""The policies of docs/security.md on Ceph RGW, which enforces them: `make test-rgw`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, cast

import boto3
import pytest
from hicache_backends.s3 import S3Storage
from hicache_conformance import Scratch
from pages import blank, hash_of, page, space
from rgw import CephRgw
from s3_kit import BUCKET, S3Conformance, config_of, plain_client
from servers import ROOT, S3Server

from hicache_storage.errors import ConfigError, HiCacheError, StorageUnavailable

GUIDE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
RIGHTS, TLS_ONLY = re.findall(r'^```json\n(\{"Version".*?)^```', GUIDE, re.MULTILINE | re.DOTALL)
ACTIONS = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject")
SPACE = space()
OWNED = space(tenant="owner")
"""The key space that the owner of the bucket writes to."""
A = hash_of(1)
ENGINE = "bank"


class GuardedRgw(CephRgw):
    """RGW with a TLS port, and with the user that the guide sets up for an engine."""

    def start(self) -> None:
        super().start()
        allow(self, rights_on(BUCKET))

    def _make(self) -> None:
        super()._make()
        self.add_user(ENGINE)
        self._run("radosgw-admin", "caps", "add", "--uid=pages", "--caps=user-policy=*")


def rights_on(bucket: str, *, without: str = "") -> str:
    """Return the policy of the guide for a bucket, without one action if `without` names one."""
    policy = json.loads(RIGHTS.replace("kv-bank", bucket))
    for statement in policy["Statement"]:
        actions = statement["Action"]
        actions = [actions] if isinstance(actions, str) else actions
        statement["Action"] = [action for action in actions if action != without]
    policy["Statement"] = [each for each in policy["Statement"] if each["Action"]]
    return json.dumps(policy)


def allow(server: CephRgw, policy: str, user: str = ENGINE) -> None:
    """Give a user this policy in place of the one that it had."""
    client: Any = cast("Any", boto3).client(
        "iam",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    client.put_user_policy(UserName=user, PolicyName="engine", PolicyDocument=policy)
    client.close()


def opened(server: CephRgw, user: str = ENGINE, **fields: Any) -> S3Storage:
    """Open the store of the bucket as a user."""
    return S3Storage.from_config({**keys_of(server, user), "max_attempts": 1, **fields})


def keys_of(server: CephRgw, user: str) -> dict[str, Any]:
    own = {"access_key_id": user, "secret_access_key": CephRgw.secret_of(user)}
    return config_of(server, "", create_bucket=False, **own)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephRgw]:
    with GuardedRgw(tmp_path_factory.mktemp("rgw")) as server:
        with plain_client(server) as client:
            client.create_bucket(Bucket=BUCKET)
        server.add_user("shop")
        yield server


@pytest.fixture
def server(running: CephRgw) -> CephRgw:
    """Return a server on which the engine's user has the rights of the guide."""
    allow(running, rights_on(BUCKET))
    return running


def test_the_rights_of_the_guide_do_for_all_that_an_engine_needs(server: CephRgw) -> None:
    with opened(server) as storage:
        storage.open_space(SPACE)
        assert [True] == storage.batch_set(SPACE, [A], [page()])
        assert [True, False] == storage.batch_exists(SPACE, [A, hash_of(2)])
        assert [True, False] == storage.batch_get(SPACE, [A, hash_of(2)], [blank(), blank()])
        assert [SPACE] == list(storage.spaces())
        assert [A] == [info.page_hash for info in storage.scan(SPACE)]
        assert [True] == storage.batch_delete(SPACE, [A])
        assert storage.clear(SPACE) == 0


@pytest.mark.parametrize("action", ACTIONS)
def test_without_one_of_them_the_store_is_refused(server: CephRgw, action: str) -> None:
    """The bucket's owner wrote the key space: in Ceph, by default only the writer can read an object."""
    with opened(
        server, access_key_id=server.access_key, secret_access_key=server.secret_key
    ) as own:
        own.open_space(OWNED)
        assert [True] == own.batch_set(OWNED, [A], [page()])
    with opened(server) as storage:
        storage.open_space(OWNED)
        calls: dict[str, Callable[[], object]] = {
            "s3:ListBucket": lambda: opened(server).close(),
            "s3:GetObject": lambda: storage.batch_get(OWNED, [A], [blank()]),
            "s3:PutObject": lambda: storage.batch_set(OWNED, [hash_of(3)], [page()]),
            "s3:DeleteObject": lambda: storage.batch_delete(OWNED, [A]),
        }
        allow(server, rights_on(BUCKET, without=action))

        with pytest.raises(HiCacheError, match=r"denies access|AccessDenied") as caught:
            calls[action]()

    expected = ConfigError if action == "s3:ListBucket" else StorageUnavailable
    assert isinstance(caught.value, expected)


def test_a_user_with_rights_on_another_bucket_is_refused(server: CephRgw) -> None:
    allow(server, rights_on("kv-shop"), "shop")

    with pytest.raises(ConfigError, match="denies access"):
        opened(server, "shop")


def test_a_bucket_that_refuses_plain_http_is_open_by_tls(server: CephRgw) -> None:
    bucket = "kv-tls"
    with plain_client(server) as client:
        client.create_bucket(Bucket=bucket)
        client.put_bucket_policy(Bucket=bucket, Policy=TLS_ONLY.replace("kv-bank", bucket))
    allow(server, rights_on(bucket))

    with pytest.raises(ConfigError, match="denies access"):
        opened(server, bucket=bucket)

    by_tls = {"endpoint_url": server.tls_endpoint_url, "ca_file": str(server.authority)}
    with opened(server, bucket=bucket, **by_tls) as storage:
        storage.open_space(SPACE)
        assert [True] == storage.batch_set(SPACE, [A], [page()])


def test_a_bucket_with_a_quota_refuses_what_does_not_fit(server: CephRgw) -> None:
    bucket = "kv-quota"
    with plain_client(server) as client:
        client.create_bucket(Bucket=bucket)
    server.limit(bucket, 256 << 10)
    allow(server, rights_on(bucket))
    hashes = [hash_of(number) for number in range(200)]

    with opened(server, bucket=bucket) as storage:
        storage.open_space(SPACE)
        done = [storage.batch_set(SPACE, [each], [page()])[0] for each in hashes]
        kept = sum(storage.batch_exists(SPACE, hashes))

        assert not all(done)
        assert 0 < kept * 4096 <= 256 << 10
        assert storage.stats().counters["refused_no_space"] == done.count(False)


class TestLeastRights(S3Conformance):
    """The kit's tests as a user that has only the rights of the guide."""

    storage_class = S3Storage
    server_class = GuardedRgw

    def config(self, scratch: Scratch) -> dict[str, Any]:
        own = keys_of(cast("CephRgw", self._server), ENGINE)
        return {**super().config(scratch), **own, "prefix": scratch.prefix}

    @property
    def _server(self) -> S3Server:
        """The server, with back doors of the engine's user: in Ceph nobody else can read its objects."""
        server = copy(super()._server)
        server.access_key, server.secret_key = ENGINE, CephRgw.secret_of(ENGINE)
        return server
