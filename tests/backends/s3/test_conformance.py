"""The kit's verdict on `s3`, over real servers."""

from __future__ import annotations

from hicache_backends.s3 import S3Storage
from s3_kit import S3Conformance
from servers import Ministack, Rclone


class TestMinistack(S3Conformance):
    """A server with S3's semantics, including conditional puts and checksums.

    Quick runs select the checks that need these.
    """

    storage_class = S3Storage
    server_class = Ministack
    in_quick_runs = "kv_(00[356]|103|30[57]|4|5)"
    timeout_s = 120.0  # the server's time grows with the square of the page size: 64 MiB take 20 s


class TestRclone(S3Conformance):
    """A server that checks signatures and has no conditional puts."""

    storage_class = S3Storage
    server_class = Rclone
    in_quick_runs = "kv_[01239]"  # this server is the faster one
