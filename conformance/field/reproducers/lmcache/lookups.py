"""How LMCache's `resp` adapter looks up a batch: lookups.py '{"type": "resp", "port": ...}'."""

import json, sys, time

import redis
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

config = json.loads(sys.argv[1])
adapter = create_l2_adapter(get_l2_adapter_config_class("resp").from_dict(config))
keys = [ObjectKey(bytes([n]) * 32, "m", 0) for n in range(256)]
task = adapter.submit_lookup_and_lock_task(keys, {})
while adapter.query_lookup_and_lock_result(task) is None:
    time.sleep(0.01)
calls = redis.Redis(port=config["port"]).info("commandstats")["cmdstat_exists"]["calls"]
print("KV-204: a lookup of 256 pages is 256 requests:", calls == 256)
adapter.close()
