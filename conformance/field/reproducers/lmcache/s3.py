"""What LMCache's `s3` does with damage and deletes: s3.py '{"type": "s3", "s3_endpoint": ...}'."""

import json, sys, time, urllib.request

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

config, key = json.loads(sys.argv[1]), ObjectKey(b"a" * 32, "m", 0)
adapter = create_l2_adapter(get_l2_adapter_config_class("s3").from_dict(config))
memory = torch.zeros(2000, dtype=torch.uint8)  # a page of 500 bytes, and what is behind it
meta = MemoryObjMetadata(torch.Size([500]), memory.dtype, 0, 500, 1)
page, url = TensorMemoryObj(memory[:500], meta, None), f"http://{config['s3_endpoint']}/"
url += f"m@00000000@0@{key.chunk_hash.hex()}"  # the page's object


def run(verb, ask):
    task = getattr(adapter, f"submit_{verb}_task")([key], *([{}] if "lookup" in verb else [[page]]))
    while not (answer := ask() if verb == "store" else ask(task)):
        time.sleep(0.01)
    return verb == "store" or answer.test(0)


def load(data=None, method="PUT"):
    urllib.request.urlopen(urllib.request.Request(url, data, method=method))
    memory[:] = 9
    return run("load", adapter.query_load_result)


run("store", adapter.pop_completed_store_tasks)
print("KV-404: a flipped bit is a hit:", load(b"\3" + bytes(499)) and int(memory[0]) == 3)
short = load(bytes(99)) and int(memory[99]) == 9
print("KV-003 KV-008 KV-202 KV-403: a short object is a hit, and the rest old memory:", short)
load(bytes(2000))
print("KV-003 KV-403: a longer object is written past the page:", int(memory[1999]) == 0)
lost = not load(method="DELETE") and run("lookup_and_lock", adapter.query_lookup_and_lock_result)
print("KV-002 KV-007 KV-501 KV-502 KV-901: a page that was deleted elsewhere stays found:", lost)
