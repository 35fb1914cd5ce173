"""What a file adapter of LMCache does with damage: damage.py '{"type": "fs", "base_path": ...}'."""

import json, sys, time
from pathlib import Path

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

config, key = json.loads(sys.argv[1]), ObjectKey(b"a" * 32, "m", 0)
adapter = create_l2_adapter(get_l2_adapter_config_class(config["type"]).from_dict(config))


def run(verb, ask, nbytes=1000):
    data = torch.zeros(nbytes, dtype=torch.uint8)
    page = TensorMemoryObj(data, MemoryObjMetadata(data.shape, data.dtype, 0, nbytes, 1), None)
    task = getattr(adapter, f"submit_{verb}_task")([key], [page])
    while (answer := ask(task)) is None:
        time.sleep(0.01)
    return answer.is_successful() if verb == "store" else answer.test(0) and data[0] == 3


def stored(task):
    return adapter.pop_completed_store_tasks().get(task)


run("store", stored)
path = next(Path(config["base_path"]).glob("*.data"))
path.write_bytes(b"\3" + path.read_bytes()[1:])
print("KV-404: a flipped bit is a hit:", bool(run("load", adapter.query_load_result)))
half = bool(run("load", adapter.query_load_result, 500))
print("KV-003 KV-008 KV-403: half of a longer file is a hit:", half)
path.write_bytes(b"\3" * 999)
lost = not run("load", adapter.query_load_result) and run("store", stored)
stays = lost and path.stat().st_size == 999
print("KV-403: a short file is a miss, and a store succeeds and leaves it:", stays)
adapter.close()
