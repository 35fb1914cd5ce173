"""What SpoolCache does without descriptors, and after an early kill: opening.py FOLDER."""

import os, resource, sys

from spoolcache import rank_store
from spoolcache.hma import GroupGeometry, HMALayout, LayerGeometry
from spoolcache.token_files import TokenFileStore

layer = LayerGeometry("l", "attention", 1000)
sizes = (256, 256, 1000, False, 1, 256)
group = GroupGeometry(0, "attention", *sizes, "full", None, 0, False, (layer,))
layout, digest = HMALayout(1024, 1, (group,)), "ab" * 32
identity = {f"expected_{name}_digest": digest for name in ("deployment", "rank", "topology")}
identity |= {"expected_rank": 0, "expected_profile": layout.profile}
identity |= {"expected_layout_digest": layout.digest}


if os.fork() == 0:
    rank_store._write_all = lambda *_: os._exit(9)
    TokenFileStore(f"{sys.argv[1]}/killed", layout=layout, **identity)
os.wait()
try:
    TokenFileStore(f"{sys.argv[1]}/killed", layout=layout, **identity)
except ValueError as error:
    print(f"KV-402: after a kill at its first byte it never opens ({error}): True")
store = TokenFileStore(f"{sys.argv[1]}/root", layout=layout, **identity)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    store.lookup(digest)
except OSError as error:
    print(f"KV-307: a lookup without a free descriptor raises ({error.strerror}): True")
