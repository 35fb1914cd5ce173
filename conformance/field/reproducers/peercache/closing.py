"""What PeerCache's client leaves after it was closed, over its storage server: closing.py PORT."""

import os, sys, threading

import torch
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}


class Pool:
    kv_buffer = torch.zeros(1000, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + 500], [500, 500]


def used(number):
    store = PeerCacheStore(None, EXTRA | {"protocol": "tcp"})
    store.register_mem_pool_host(Pool())
    store.batch_set_v1([f"hash{number}"], None)
    store.batch_get_v1([f"hash{number}"], None)
    store.close()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


before = used(0)
more = [after - one for after, one in zip([used(number) for number in range(1, 11)][-1], before)]
print(f"KV-301 KV-302: {more[0]} descriptors and {more[1]} threads stay of ten:", min(more) >= 10)
os._exit(sys.stdout.flush() or 0)
