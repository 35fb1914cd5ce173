"""The kit's verdict on `s3` over Ceph RGW: `make test-rgw`, not a part of `make test`."""

from __future__ import annotations

from hicache_backends.s3 import S3Storage
from rgw import CephRgw
from s3_kit import S3Conformance


class TestRgw(S3Conformance):
    """A server that is common in production: signatures, conditional puts, chunked answers."""

    storage_class = S3Storage
    server_class = CephRgw
