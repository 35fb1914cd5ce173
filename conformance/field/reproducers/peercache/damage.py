"""What PeerCache returns for a damaged page, over its storage server: damage.py PORT."""

import os, sys, time

import torch
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}


class Pool:
    kv_buffer = torch.zeros(1000, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + 500], [500, 500]


store = PeerCacheStore(None, EXTRA | {"protocol": "tcp"})
store.register_mem_pool_host(Pool())
time.sleep(5)  # until both know of each other
store.batch_set_v1(["hash"], None)
(place,) = store.runtime.directory.get(["hash_0_k"])
flipped = torch.ones(1, dtype=torch.uint8)
byte = ([place.rdma_endpoint], [flipped.data_ptr()], [place.remote_addr], [place.rkey], [1])
store.runtime.transport.batch_write_v(*byte)
hit = store.batch_get_v1(["hash"], None) == [True] and int(Pool.kv_buffer[0]) == 1
print("KV-404: a flipped bit is a hit:", hit)
os._exit(sys.stdout.flush() or 0)
