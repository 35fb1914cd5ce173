"""Who shares a row of vLLM's `fs` tier, and what it does with damage: pages.py FOLDER."""

import mmap, numpy, sys, time
from pathlib import Path
from types import SimpleNamespace as Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

rows = numpy.frombuffer(mmap.mmap(-1, 3 * 4096), "uint8").reshape(3, 4096)
keys = [make_offload_key(bytes([n]) * 32, 0) for n in (0, 1, 2)]


def run(verb, numbers, model="m"):
    one = Any(rank=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False)
    config = Any(groups=[], model=Any(name=model, dtype="bf16"), parallel=one)
    config.cache, config.canonical_layout, config.replicated_layout = Any(tokens_per_hash=16), 0, 0
    spec, folder = Any(config=config, blocks_per_chunk=1), sys.argv[1]
    tier = FileSystemTierManager(spec, rows.data, "fs", folder)
    places, load = numpy.array(numbers, "int32"), verb == "load"
    job = TransferJob(0, [keys[n] for n in numbers], places, load, ReqContext("r"))
    getattr(tier, f"submit_{verb}")(job)
    while not (done := list(tier.get_finished_jobs())):
        time.sleep(0.01)
    return done[0].success, len(done[0].successful_keys or ())


run("store", [0, 1, 2])
print("KV-001 KV-101: no layout or revision is in a path, so all load it:", run("load", [0])[0])
first, second, _ = sorted(Path(sys.argv[1]).rglob("*.bin"))
first.write_bytes(b"\3" + bytes(8191))
hit = bool(run("load", [0])[0] and rows[0, 0] == 3)
print("KV-003 KV-008 KV-403 KV-404: a longer row with a flipped bit is a hit:", hit)
second.write_bytes(bytes(99))
one = run("load", [0, 1, 2]) == (False, 1)
print("KV-202 KV-403: a short row fails the row behind it, too:", one)
