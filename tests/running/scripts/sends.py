"""Measures a cable: `sends.py listens ADDRESS` tells how many bytes came, `sends.py calls ADDRESS` how many seconds a call took."""

import socket
import sys
import time

what, address = sys.argv[1:]
if what == "listens":
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 5000), family=family) as server:
        print("ready", flush=True)
        with server.accept()[0] as peer:
            print(sum(map(len, iter(lambda: peer.recv(1000), b""))))
else:
    began = time.monotonic()
    with socket.create_connection((address, 5000)) as peer:
        print(time.monotonic() - began)
        peer.sendall(bytes(200_000))
