"""What OpenLake's client does if it is closed during a call: closing.py HOST:PORT."""

import ctypes, sys, threading

from openlake_client import Client

client, stop = Client(device="local", client_id=2048), threading.Event()
client.attach(sys.argv[1], 0, 54 + 4096)
page, raised = ctypes.create_string_buffer(4096), False


def put():
    while not stop.is_set():
        client.put_batch([bytes(54)] * 64, [[ctypes.addressof(page)]] * 64, [[4096]] * 64)


thread = threading.Thread(target=put, daemon=True)
thread.start()
for _ in range(1000):
    try:
        client.batch_is_exist([bytes(54)])
        client.close()
        break
    except RuntimeError as error:
        raised = str(error) == "Already borrowed"
        break
stop.set()
print("KV-301: close during a call raises RuntimeError (Already borrowed):", raised)
