"""Confines a server to 127.0.0.2, and tells for some addresses whether it gets a connection from there."""

import contextlib
import ipaddress
import socket
import warnings

from tfrep_strategy.cluster.rendezvous import confinement
from tfrep_strategy.cluster.rendezvous.connections import free_ports

SECONDS = 0.5
(port,) = free_ports(1, "")
confinement.machines_of_run = lambda *others: ([ipaddress.ip_network("127.0.0.2")], None)
family, both = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
with warnings.catch_warnings():
    warnings.simplefilter("error")  # It is confined.
    with confinement.confined(f"127.0.0.1:{port}", []):
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both, reuse_port=True)  # As TensorFlow does.
server.settimeout(SECONDS)
for source in ("127.0.0.2", "127.0.0.3", "127.0.0.1", "127.0.0.2"):
    gets = False
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), SECONDS, source_address=(source, 0)):
        server.accept()[0].close()
        gets = True
    print(source, gets)
