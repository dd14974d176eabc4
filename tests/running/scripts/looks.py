"""What two machines see of each other: `looks.py list` and `looks.py try HOST [SOURCE]`. Each answers lines of JSON.

`list` begins with a port that is open to everybody. It then gets a process, and tells on which TCP ports this one and its children
listen, by process and name. `try` gets ports of the host, and tells which take a connection (from an address of this machine), and
do not hang up at once.
"""

import contextlib
import json
import socket
import sys

import psutil

SOURCE = (sys.argv[3], 0) if sys.argv[3:] else None


def listed(parent: int) -> dict[int, str]:
    found = {}
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(parent)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for connection in each.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.port] = f"{each.pid} {connection.laddr.ip}"
    return found


def taken(ports: list[int], host: str) -> list[int]:
    found = []
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0, source_address=SOURCE) as link:
            link.settimeout(1.0)
            with contextlib.suppress(TimeoutError):
                if not link.recv(1):
                    continue
            found.append(port)
    return found


if sys.argv[1] == "list":
    door = socket.create_server(("", 0))
    print(json.dumps(door.getsockname()[1]), flush=True)
    door.setblocking(False)
for line in sys.stdin:
    if sys.argv[1] == "list":
        with contextlib.suppress(BlockingIOError):
            while True:
                door.accept()[0].close()
    given = json.loads(line)
    print(json.dumps(listed(given) if sys.argv[1] == "list" else taken(given, sys.argv[2])), flush=True)
