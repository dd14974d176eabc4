"""Programs that the kernel runs for each packet that comes to a socket. They tell the addresses of some networks from others."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

from tfrep_strategy.validation import Network

TAKES_PACKETS, TAKES_CONNECTIONS = 26, 51
"""Programs that say whether a socket takes a packet, and which of those that share a port gets a connection."""
_LONGEST_PROGRAM = 4096


def attach(server: socket.socket, networks: Sequence[Network], kind: int = TAKES_PACKETS) -> None:
    """Gives a socket such a program. It needs no privilege.

    Args:
        server: The socket.
        networks: From whose addresses it takes packets. Or: whose connections go to the second of the sockets that share the port,
            if there is one, and those of others to the first.
        kind: What the program says.

    Raises:
        OSError: The system has no such programs, or there are too many networks.

    Example:
        >>> with socket.create_server(("", 0)) as server:
        ...     attach(server, [])
    """
    program = _program(networks, 1 if kind == TAKES_CONNECTIONS else _ALL_BYTES)
    length = len(program) // 8
    if length > _LONGEST_PROGRAM:
        raise OSError(f"too many addresses ({len(networks)})")
    if not hasattr(socket, "SO_BINDTODEVICE"):
        raise OSError("only Linux can confine a socket that listens")
    code = ctypes.create_string_buffer(program, len(program))
    server.setsockopt(socket.SOL_SOCKET, kind, struct.pack("@HP", length, ctypes.addressof(code)))


# Instructions of the Berkeley packet filter.
_LOAD, _LOAD_BYTE, _AND, _SHIFT_RIGHT, _IF_EQUAL, _GO, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x05, 0x06
_HEADER = 0xFFF00000
"""Where the header of the network layer begins."""
_SOURCE = {4: 12, 6: 8}
"""Where the header has the address of the sender."""
_ALL_BYTES = 0xFFFFFFFF


def _program(networks: Sequence[Network], known: int) -> bytes:
    """Returns the program that says a number for packets from these networks, and 0 for others."""
    parts = {
        version: b"".join(_check(each, known) for each in networks if each.version == version) + _instruction(_RETURN, 0)
        for version in (4, 6)
    }
    return b"".join(
        [
            _instruction(_LOAD_BYTE, _HEADER),
            _instruction(_SHIFT_RIGHT, 4),
            _instruction(_IF_EQUAL, 4, otherwise=1),
            _instruction(_GO, len(parts[6]) // 8),
            parts[6],
            parts[4],
        ]
    )


def _check(network: Network, known: int) -> bytes:
    """Returns the part of the program for packets from a network, which goes on with the others."""
    packed, mask = network.network_address.packed, network.netmask.packed
    words = len(packed) // 4
    steps = []
    for i, (wanted, counts) in enumerate(zip(struct.iter_unpack("!I", packed), struct.iter_unpack("!I", mask), strict=True)):
        steps.append(_instruction(_LOAD, _HEADER + _SOURCE[network.version] + 4 * i))
        steps.append(_instruction(_AND, counts[0]))
        steps.append(_instruction(_IF_EQUAL, wanted[0], otherwise=3 * (words - i - 1) + 1))
    return b"".join([*steps, _instruction(_RETURN, known)])


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
