"""What LMCache's `resp` does with a deleted page: deleted.py '{"type": "resp", "port": ...}'."""

import json, os, sys, time

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

config = json.loads(sys.argv[1])
adapter = create_l2_adapter(get_l2_adapter_config_class("resp").from_dict(config))
data = torch.zeros(1024, dtype=torch.uint8)
page = TensorMemoryObj(data, MemoryObjMetadata(data.shape, data.dtype, 0, 1024, 1), None)
task, end = adapter.submit_load_task([ObjectKey(b"a" * 32, "m", 0)], [page]), time.time() + 10
while (answer := adapter.query_load_result(task)) is None and time.time() < end:
    time.sleep(0.01)
print("KV-002 KV-501 KV-503: a load of a page that is gone has no answer in 10 s:", answer is None)
sys.stdout.flush()
os._exit(0)
