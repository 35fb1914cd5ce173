"""What PeerCache's client leaves after it was closed, over its storage server: closing.py PORT."""

import os, sys, threading

from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}


def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def open_and_close():
    PeerCacheStore(None, EXTRA | {"protocol": "tcp"}).close()


open_and_close()
before = count()
for _ in range(10):
    open_and_close()
more = [after - one for after, one in zip(count(), before)]
print(f"KV-301 KV-302: ten times opened and closed, {more[0]} descriptors stay:", more[0] >= 10)
os._exit(sys.stdout.flush() or 0)
