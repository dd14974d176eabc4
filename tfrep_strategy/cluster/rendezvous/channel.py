"""Channels: how the processes of a run prove that they know its secret, and the messages that they send each other.

A message is data that has a schema. On the wire it is a length of four bytes, the kind of the message, a line end, and JSON. A
process that reads one runs no code of the sender, takes no more memory than a limit, and waits no longer than a limit.

At the start, the end that listened sends a random number. The other end answers with another one, and with a digest of both that
needs the secret; then the first end sends such a digest. Neither end sends the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from tfrep_strategy.cluster.rendezvous.connections import notice_loss

CONNECT_SECONDS = 10.0
GREETING_SECONDS = 60
"""Seconds that the hub may take to greet a rank, since all ranks of a run come at once and rank 0 may be busy. Afterwards, seconds
that a message may pause. The system gives up a broken connection earlier."""
LONGEST = 1 << 26
"""The longest message in bytes."""
_HELLO = b"tfrep-messages-1 "
"""What both ends send first. Another number stands for another way to write messages."""
_NONCE, _PROOF, _REFUSAL = 32, 32, b"another secret"
_AT_ONCE = 1 << 16
_AGAIN_SECONDS = 0.2
_LENGTH = struct.Struct("!I")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class WrongSecretError(Exception):
    """The other end has another secret."""


class UnreadableError(OSError):
    """The other end has sent something else than a message: it is another program, or has another version of this package."""


class Schema:
    """The kinds of messages that one end receives.

    Args:
        kinds: The types of the contents of each kind, for pydantic.

    Example:
        >>> Schema({"ended": tuple[int, str | None]}).read(b'ended\\n[3, null]')
        ('ended', 3, None)
    """

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self._kinds, self._adapters = kinds, dict[str, TypeAdapter[Any]]()

    def read(self, body: bytes) -> tuple[Any, ...]:
        """Returns the kind of a message and its contents.

        Raises:
            UnreadableError: There is no such kind, or its contents have other types.
        """
        name, _, contents = body.partition(b"\n")
        kind = name.decode(errors="replace")
        try:
            if kind not in self._adapters:  # Made when it is first needed: a run uses few kinds.
                self._adapters[kind] = TypeAdapter(self._kinds[kind])
            return kind, *self._adapters[kind].validate_json(contents, strict=True)
        except (KeyError, ValueError):
            raise UnreadableError(f"no message of a kind that is expected here ({kind[:40]!r})") from None


class Channel:
    """One end of a connection that carries messages. One thread may receive, while others send.

    Args:
        peer: A connected socket, which belongs to the channel now.
        schema: The messages that this end receives.
        seconds: As for `limit`.
        longest: The longest message that this end receives.

    Example:
        >>> schema = Schema({"rank": tuple[int]})
        >>> here, there = (Channel(end, schema) for end in socket.socketpair())
        >>> here.send("rank", 1)
        >>> there.receive()
        ('rank', 1)
        >>> here.close(), there.close()
        (None, None)
    """

    def __init__(self, peer: socket.socket, schema: Schema, seconds: int = GREETING_SECONDS, longest: int = LONGEST) -> None:
        self._socket, self.schema, self.longest = peer, schema, longest
        self._sending, self._begun = threading.Lock(), bytearray()  # A message that has not come in full.
        peer.settimeout(
            None
        )  # The script may have set a default. Another process may use the connection, too, and expect it to block.
        if peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_loss(peer)
        self.limit(seconds)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def limit(self, seconds: int) -> None:
        """Sets how long the other end may pause inside a message, and may leave what is sent to it unread."""
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", seconds, 0))

    def fileno(self) -> int:
        """Returns the descriptor of the connection."""
        return self._socket.fileno()

    def send(self, kind: str, *contents: Any) -> None:
        """Sends a message, which is made by `write`.

        Raises:
            OSError: The other end has gone, or reads nothing. No further message can be sent.
        """
        self.send_written(write(kind, *contents))

    def send_written(self, body: bytes) -> None:
        """Sends a message that was made by `write`."""
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(body)) + body, _NO_SIGNAL)
            except BlockingIOError:  # A part of the message may have been sent.
                self._socket.shutdown(socket.SHUT_RDWR)
                raise

    def receive(self) -> tuple[Any, ...]:
        """Returns the kind of the next message and its contents.

        Raises:
            EOFError: The other end has gone.
            BlockingIOError: It is silent.
            OSError: The connection has broken, or something else than a message came.
        """
        return self.schema.read(self._received(self.longest))

    def arrived(self, *end: Any) -> Iterator[tuple[Any, ...]]:
        """Yields the messages that have come in full. It waits for none: the other end may stop in the middle of one.

        Args:
            *end: The last message, if the other end has gone, or has sent something else than a message.

        Yields:
            As `receive` returns them.

        Example:
            >>> here, there = (Channel(end, Schema({"rank": tuple[int]})) for end in socket.socketpair())
            >>> here.send("rank", 1)
            >>> list(there.arrived())
            [('rank', 1)]
            >>> here.close(), there.close()
            (None, None)
        """
        try:
            new = self._socket.recv(_AT_ONCE, socket.MSG_DONTWAIT)
            if not new:
                raise EOFError
            self._begun += new
            while len(self._begun) >= _LENGTH.size and len(self._begun) - _LENGTH.size >= _size(self._begun, self.longest):
                yield self.receive()
        except BlockingIOError:  # There is nothing to read.
            pass
        except (EOFError, OSError):
            yield end

    def poll(self, seconds: float) -> bool:
        """Returns whether something can be received, or the other end has gone. Waits for some seconds at most.

        Raises:
            OSError: This end is closed.
        """
        try:
            return bool(speaking([self], seconds))
        except ValueError:
            raise OSError("the channel is closed") from None

    def give_descriptor(self, descriptor: int) -> None:
        """Sends an open descriptor over a local socket, between two messages. It stays open here."""
        socket.send_fds(self._socket, [b"."], [descriptor], _NO_SIGNAL)

    def take_descriptor(self) -> int:
        """Receives a descriptor.

        Raises:
            EOFError: The other end has gone, or has sent none.
        """
        _, descriptors, *_ = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not descriptors:
            raise EOFError
        return descriptors[0]

    def close(self) -> None:
        """Closes this end. The other end does not notice it if another process has the connection open, too."""
        self._socket.close()

    def hang_up(self) -> None:
        """Ends the connection, which both ends notice, and closes this end."""
        self.interrupt()
        with self._sending:
            self._socket.close()

    def interrupt(self) -> None:
        """Ends the connection, so that no thread waits for it any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def admit(self, key: bytes) -> None:
        """Lets the other end, which has connected, prove that it knows the secret. Nothing is read before that.

        Raises:
            WrongSecretError: The other end has another secret.
            EOFError, OSError: As for `receive`.
        """
        own = secrets.token_bytes(_NONCE)
        self.send_written(_HELLO + own)
        said = self._greeting(_NONCE + _PROOF)
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(key, b"guest", own, theirs)):
            self.send_written(_REFUSAL)
            raise WrongSecretError
        self.send_written(_proof(key, b"host", own, theirs))

    def enter(self, key: bytes) -> None:
        """Proves to the other end, which has listened, that this one knows the secret, and lets it prove the same.

        Raises:
            WrongSecretError: The other end has another secret.
            EOFError, OSError: As for `receive`.
        """
        own, theirs = secrets.token_bytes(_NONCE), self._greeting(_NONCE)
        self.send_written(_HELLO + own + _proof(key, b"guest", theirs, own))
        if not hmac.compare_digest(self._received(_PROOF), _proof(key, b"host", theirs, own)):
            raise WrongSecretError

    def _greeting(self, size: int) -> bytes:
        said = self._received(len(_HELLO) + size)
        if not said.startswith(_HELLO) or len(said) != len(_HELLO) + size:
            raise UnreadableError("no greeting")
        return said.removeprefix(_HELLO)

    def _received(self, longest: int) -> bytes:
        return self._read(_size(self._read(_LENGTH.size), longest))

    def _read(self, size: int) -> bytes:
        found = self._begun[:size]
        del self._begun[:size]
        while len(found) < size:  # Memory is taken for what has come, not for what was announced.
            new = self._socket.recv(min(size - len(found), _AT_ONCE))
            if not new:
                raise EOFError
            found += new
        return bytes(found)


def _size(begun: bytes | bytearray, longest: int) -> int:
    """Returns the size of the message that begins so."""
    [size] = _LENGTH.unpack_from(begun)
    if size > longest:
        raise UnreadableError(f"a message of {size} bytes")
    return int(size)


def write(kind: str, *contents: Any) -> bytes:
    """Returns a message. A range becomes an object, which is short for any number of ranks, and so does a dataclass.

    Example:
        >>> write("agreed", range(2))
        b'agreed\\n[{"start": 0, "stop": 2}]'
    """
    # A file's name may have characters that no encoding has.
    return f"{kind}\n{json.dumps(contents, ensure_ascii=False, default=_as_object)}".encode(errors="replace")


def _as_object(content: Any) -> dict[str, Any]:
    return {"start": content.start, "stop": content.stop} if isinstance(content, range) else asdict(content)


def speaking(channels: Sequence[Channel], seconds: float) -> list[Any]:
    """Returns the channels from which something can be received. Waits for some seconds at most until there is one.

    Example:
        >>> here, there = (Channel(end, Schema({})) for end in socket.socketpair())
        >>> there.send("sign")
        >>> speaking([here, there], 1.0) == [here]
        True
        >>> here.close(), there.close()
        (None, None)
    """
    with selectors.PollSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def connect(addresses: Sequence[str], port: int, key: bytes, schema: Schema, *first: Any) -> Channel | None:
    """Connects to a process that may have several addresses, such as rank 0 with its hub.

    Args:
        addresses: Possible addresses of the process, the best first.
        port: Its port.
        key: Shared secret.
        schema: The messages that come from there.
        *first: The first message to it.

    Returns:
        The channel; None if it could not be reached within 10 seconds, or did not greet this process within 60.
    """
    deadline = time.monotonic() + CONNECT_SECONDS
    for number, address in enumerate(addresses, 1):
        left = deadline - time.monotonic()
        patience = left if number == len(addresses) else min(3.0, left)
        if patience <= 0:
            break
        until = time.monotonic() + patience
        with contextlib.suppress(OSError, WrongSecretError):  # Another program may listen there and answer anything.
            while time.monotonic() < until:
                peer = socket.create_connection((address, port), patience)
                with contextlib.suppress(EOFError, ConnectionError):  # A hub that greets many programs may hang up on a rank.
                    return introduced(peer, key, schema, GREETING_SECONDS, *first)
                time.sleep(_AGAIN_SECONDS)
    return None


def introduced(peer: socket.socket, key: bytes, schema: Schema, seconds: int, *first: Any) -> Channel:
    """Proves to the other end that this one knows the secret, and sends a first message. If that fails, the connection is closed.

    Args:
        peer: A socket that has connected.
        key: Shared secret.
        schema: The messages that come from there.
        seconds: How long the other end may take for a part of the proof.
        *first: The message.

    Raises:
        WrongSecretError, EOFError, OSError: As for `Channel.enter`.
    """
    channel = Channel(peer, schema, seconds)
    try:
        channel.enter(key)
        channel.send(*first)
        channel.limit(GREETING_SECONDS)
    except BaseException:
        channel.close()
        raise
    return channel


def _proof(key: bytes, role: bytes, of_host: bytes, of_guest: bytes) -> bytes:
    return hmac.digest(key, role + of_host + of_guest, "sha256")
