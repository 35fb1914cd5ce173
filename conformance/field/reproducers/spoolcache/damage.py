"""What SpoolCache's token files do with a flipped bit: damage.py FOLDER."""

import sys
from contextlib import contextmanager

from spoolcache.hma import GroupGeometry, HMALayout, LayerGeometry
from spoolcache.token_files import TokenFileStore

layer = LayerGeometry("l", "attention", 1000)
sizes = (256, 256, 1000, False, 1, 256)
group = GroupGeometry(0, "attention", *sizes, "full", None, 0, False, (layer,))
layout, digest, key = HMALayout(1024, 1, (group,)), "ab" * 32, "cd" * 32
names = ("deployment", "rank", "topology")
identity = {f"expected_{name}_digest": digest for name in names}
identity |= {"expected_rank": 0, "expected_profile": layout.profile}
identity |= {"expected_layout_digest": layout.digest}
store = TokenFileStore(sys.argv[1] + "/root", layout=layout, **identity)
store.commit_chunk(key, None, 256, bytes(1000))
path = store.root / "manifests" / key[:2] / f"{key}.kv"
path.write_bytes(path.read_bytes()[:-1] + b"\1")


@contextmanager
def receiver(_):
    yield bytes


found = store.lookup(key).is_hit
try:
    with store.restore_view(key) as view:
        store.stream_objects(view.descriptors, receiver, lease=view)
except Exception as error:
    print(f"KV-404: found, and the load raises {type(error).__name__}, and a worker exits:", found)
