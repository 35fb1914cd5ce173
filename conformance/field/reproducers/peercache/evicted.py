"""What PeerCache returns for a page that was evicted after its look-up: evicted.py PORT."""

import os, sys, time

import torch
from peercache.config import PeerCacheConfig
from peercache.storage_server import StorageServer
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{int(sys.argv[1]) + 1}", "mode": "centralized"}
EXTRA |= {"protocol": "tcp", "global_segment_size": 1000}  # room for one page


class Pool:
    kv_buffer = torch.zeros(1000, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + 500], [500, 500]


StorageServer(PeerCacheConfig(**EXTRA, role="storage")).start()
store = PeerCacheStore(None, EXTRA | {"role": "inference"})
store.register_mem_pool_host(Pool())
time.sleep(5)  # until both know of each other
for number, page_hash in enumerate(["first", "second"], 1):
    Pool.kv_buffer.fill_(number)
    store.batch_set_v1([page_hash], None)
    found = number == 1 and store.batch_exists(["first"])
Pool.kv_buffer.fill_(0)
hit = store.batch_get_v1(["first"], None) == [True] and int(Pool.kv_buffer[0]) == 2
print("KV-003: a page that is evicted between look-up and get is a hit of another:", hit)
os._exit(sys.stdout.flush() or 0)
