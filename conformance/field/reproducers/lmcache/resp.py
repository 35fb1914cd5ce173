"""What LMCache's `resp` adapter does with damage: resp.py '{"type": "resp", "port": ...}'."""

import json, os, sys, time

import redis, torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

config, key = json.loads(sys.argv[1]), ObjectKey(b"a" * 32, "m", 0)
adapter = create_l2_adapter(get_l2_adapter_config_class("resp").from_dict(config))
server, data = redis.Redis(port=config["port"]), torch.zeros(1024, dtype=torch.uint8)
page = TensorMemoryObj(data, MemoryObjMetadata(data.shape, data.dtype, 0, 1024, 1), None)


def wait(ask, *task):
    while (answer := ask(*task)) in (None, {}):
        time.sleep(0.01)
    return answer


def load():
    return wait(adapter.query_load_result, adapter.submit_load_task([key], [page])).test(0)


adapter.submit_store_task([key], [page])
wait(adapter.pop_completed_store_tasks)
server.setrange(server.keys()[0], 0, b"\3")
print("KV-404: a flipped bit is a hit:", load() and int(data[0]) == 3)
server.set(server.keys()[0], bytes(2048))
loads = [load() for _ in range(8)]
task = adapter.submit_lookup_and_lock_task([key], {})
found = wait(adapter.query_lookup_and_lock_result, task).test(0)
print("KV-003 KV-008 KV-202 KV-403: after loads of a longer value no page is found:", not found)
sys.stdout.flush()
os._exit(0)
