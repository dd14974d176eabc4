"""What is read from outside, and what it must be like: environment variables, JSON, the options of a run. Pydantic checks it."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shlex
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from tfrep_strategy.errors import LONGEST_SECONDS, ConfigurationError, message, shortened

MOST_RANKS = 100_000
"""No run is larger. What says so was read from the wrong place, and would fill the memory with names."""
MOST_PROCESSES = 1_000
"""No machine has more processes, or logical devices, of one run."""

_UNSET = object()
_HOST = re.compile(r"\[[0-9A-Za-z:.%_-]+\]|[^\s\x00-\x1f\[\]/@,]+")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (_HOST.fullmatch(host) and re.fullmatch(r"0*[1-9][0-9]{0,4}", port) and int(port[-5:]) < 65536 and len(text) < 300):
        raise ValueError('write "host:port", with a port below 65536')
    return text


def _networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(ipaddress.ip_network(each.strip()) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f'write networks as "10.0.0.0/8,fd00::/8" ({error})') from None


def _numbers(text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text):
        raise ValueError("write a valid integer, or two as in 1:4")
    return tuple(map(int, text.split(":")))


def _command_line(text: str) -> tuple[str, ...]:
    if not (words := tuple(shlex.split(text))):  # A ValueError says what is wrong with its quotes.
        raise ValueError("write a command")
    return words


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = Annotated[tuple[Network, ...], BeforeValidator(_networks)]
CommandLine = Annotated[tuple[str, ...], BeforeValidator(_command_line)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
"""A number, or a smallest and a largest one."""
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Size = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
Limit = Annotated[float, Field(ge=0, le=LONGEST_SECONDS)]
"""Seconds, of which 0 stands for no limit."""
ProfiledSeconds = Annotated[float, Field(gt=0, le=60)]
"""A longer trace would fill the memory, and nobody could read it."""
Address = Annotated[str, AfterValidator(_address)]


def variable(kind: Any, *names: str, default: Any = _UNSET) -> Any:
    """Reads the first of several environment variables that is set. One that is empty is not set.

    Args:
        kind: What it must be: a type that pydantic knows, such as `Rank`.
        *names: Names of the variables, the preferred one first.
        default: The result if none is set. Without a default that is an error.

    Returns:
        The value.

    Raises:
        ConfigurationError: No variable is set, or its value cannot be used.

    Example:
        >>> os.environ["MY_SIZE"] = "3"
        >>> variable(Size, "MY_SIZE"), variable(Rank, "MY_RANK", default=0)
        (3, 0)
    """
    name = next((name for name in names if os.environ.get(name)), None)
    if name is not None:
        return checked(kind, name, os.environ[name], hint="set it to another value, or unset it.")
    if default is not _UNSET:
        return default
    raise ConfigurationError(message(f"The environment variable {' or '.join(names)} is missing.", hint="set it."))


def checked(kind: Any, name: str, value: Any, *, hint: str | None = None, strict: bool = False, is_json: bool = False) -> Any:
    """Returns a setting as what it must be.

    Args:
        kind: What it must be: a type that pydantic knows.
        name: Name of the setting, for messages.
        value: What was given.
        hint: What the user can do.
        strict: Whether the text of a number is refused.
        is_json: Whether the value is JSON.

    Returns:
        The value.

    Raises:
        ConfigurationError: It cannot be used.

    Example:
        >>> checked(Port, "port", "70000")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: port cannot be used: input should be less than or equal to 65535. ...
    """
    try:
        adapter = _adapter(kind)
        return adapter.validate_json(value, strict=strict) if is_json else adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    what = shortened(first["msg"].removeprefix("Value error, "))
    # Outside of JSON a name is that of a type among several.
    place = ".".join([name, *(str(part) for part in first["loc"] if is_json or isinstance(part, int))])
    wrong = value if first["type"] == "missing" else first["input"]
    raise ConfigurationError(message(f"{place} cannot be used: {what[:1].lower()}{what[1:]}.", hint=hint, **{place: wrong}))


def check_fields(given: Any) -> None:
    """Refuses a dataclass of which a field is not what its annotation says.

    Args:
        given: The dataclass.

    Raises:
        ConfigurationError: A field cannot be used.

    Example:
        >>> from tfrep_strategy.running.coordinator import ClusterOptions
        >>> ClusterOptions(workers="2")
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: workers cannot be used: input should be a valid integer. Received: workers='2'
    """
    for name, kind in _annotations(given.__class__):
        checked(kind, name, getattr(given, name), strict=True)


def made_folder(name: str, wanted: str | os.PathLike[str]) -> Path:
    """Makes the folder that a setting names, if there is none.

    Args:
        name: Name of the setting, for messages.
        wanted: Path of the folder.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: It cannot be made.

    Example:
        >>> made_folder("log_dir", "logs").name
        'logs'
    """
    folder = Path(wanted).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # A name cannot have a zero in it.
        what = f"Cannot make the folder ({getattr(error, 'strerror', error)})."
        raise ConfigurationError(message(what, hint="name another one.", **{name: str(wanted)})) from None
    return folder


def writable(name: str, wanted: str | os.PathLike[str]) -> Path:
    """Makes the folder that a setting names, if there is none, and makes sure that files can be written there.

    Args:
        name: Name of the setting, for messages.
        wanted: Path of the folder.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: It cannot be made, or nothing can be written there.

    Example:
        >>> writable("log_dir", "logs").name
        'logs'
    """
    folder = made_folder(name, wanted)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        what = f"Cannot write to the folder ({error.strerror})."
        raise ConfigurationError(message(what, hint="name another one.", **{name: str(wanted)})) from None


def check_scheme(address: str, known: Collection[str]) -> None:
    """Refuses an address of a folder for backups for which TensorFlow has no file system.

    Args:
        address: The address, or a path.
        known: The schemes of TensorFlow's file systems.

    Raises:
        ConfigurationError: It has none.

    Example:
        >>> check_scheme("nfs://host/run", ["", "gs"])
        Traceback (most recent call last):
        tfrep_strategy.errors.ConfigurationError: TensorFlow has no file system for addresses that begin with nfs://. ...
    """
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme not in known:
        what = f"TensorFlow has no file system for addresses that begin with {scheme}://."
        hint = f"use one of {', '.join(sorted(filter(None, known)))}, name a folder, or install what adds it to TensorFlow."
        raise ConfigurationError(message(what, hint=hint, backup_dir=address))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@functools.cache
def _annotations(kind: Any) -> list[tuple[str, Any]]:
    return list(get_type_hints(kind, include_extras=True).items())
