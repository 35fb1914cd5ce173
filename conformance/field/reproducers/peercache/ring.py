"""What PeerCache's look-up of a node does while another node joins or leaves: ring.py."""

import sys, threading

from peercache.hashring import ConsistentHashRing

sys.setswitchinterval(1e-5)
ring, stop, raised = ConsistentHashRing(), threading.Event(), False
ring.set_nodes(["a", "b"])


def join_and_leave():
    while not stop.is_set():
        ring.set_nodes(["a", "b", "c"])
        ring.set_nodes(["a", "b"])


threading.Thread(target=join_and_leave).start()
for number in range(100_000):
    try:
        ring.get_node(str(number))
    except KeyError:
        raised = True
        break
stop.set()
print("KV-006 KV-105 KV-202 KV-903: a call while a node joins or leaves raises KeyError:", raised)
