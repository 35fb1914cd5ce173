"""Who shares a page of an L2 adapter of LMCache: keys.py '{"type": "fs", "base_path": ...}'."""

import json, sys, time

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

config = json.loads(sys.argv[1])
adapter = create_l2_adapter(get_l2_adapter_config_class(config["type"]).from_dict(config))
data = torch.ones(1000, dtype=torch.uint8)
page = TensorMemoryObj(data, MemoryObjMetadata(data.shape, data.dtype, 0, 1000, 1), None)


def done(ask, *task):
    while (answer := ask(*task)) in (None, {}):
        time.sleep(0.01)
    return answer


def store(*key):
    adapter.submit_store_task([ObjectKey(*key)], [page])
    return done(adapter.pop_completed_store_tasks).popitem()[1].is_successful()


def found(*key):
    task = adapter.submit_lookup_and_lock_task([ObjectKey(*key)], {})
    return done(adapter.query_lookup_and_lock_result, task).test(0)


rank = ObjectKey.ComputeKVRank(8, 0, 8, 0)
shared = store(b"a" * 32, "m", rank) and found(b"a" * 32, "m", rank)
fields = shared and "dtype" not in ObjectKey.__dataclass_fields__
print("KV-001 KV-101: found by any server, as no key has dtype, layout or revision:", fields)
print("KV-106: rank 0 of TP 2 x PP 4 finds rank 0 of TP 8, as both have this key:", shared)
print("KV-105: a model name of 180 characters stores nothing:", not store(b"l" * 32, "m" * 180, 0))
both = store(b"b", "a/b", 0) and found(b"b", "a-SEP-b", 0)
print("KV-105: model a-SEP-b has model a/b's page:", both)
adapter.close()
