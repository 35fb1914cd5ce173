"""What Redhare's client leaves after it was closed: closing.py REDIS_URL."""

import os, sys

from redhare import KvStore


def open_and_close(number):
    place = {"data_plane_addr": "127.0.0.1:0", "cluster": "c", "transport": "tcp"}
    name = f"client{number}"
    KvStore(redis_url=sys.argv[1], client_id=name, capacity=64 << 20, **place).close()


open_and_close(0)
before = len(os.listdir("/proc/self/fd"))
for number in range(1, 11):
    open_and_close(number)
more = len(os.listdir("/proc/self/fd")) - before
print(f"KV-301 KV-302: ten times opened and closed, {more} descriptors stay:", more >= 10)
