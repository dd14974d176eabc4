"""Validation of settings from outside, by pydantic: environment variables, JSON, the options of a run."""

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
"""The largest run. A larger number was read from the wrong place, and would fill the memory with names."""
MOST_PROCESSES = 1_000
"""The largest number of processes, or logical devices, of a run on a machine."""

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
    if not (words := tuple(shlex.split(text))):  # A ValueError describes an error in its quotes.
        raise ValueError("write a command")
    return words


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = Annotated[tuple[Network, ...], BeforeValidator(_networks)]
CommandLine = Annotated[tuple[str, ...], BeforeValidator(_command_line)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
"""A number, or a range of two."""
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Size = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
Limit = Annotated[float, Field(ge=0, le=LONGEST_SECONDS)]
"""Seconds; 0 means no limit."""
ProfiledSeconds = Annotated[float, Field(gt=0, le=60)]
"""A longer trace would fill the memory, and be unreadable."""
Address = Annotated[str, AfterValidator(_address)]


def variable(kind: Any, *names: str, default: Any = _UNSET) -> Any:
    """Reads the first of several environment variables that is set. An empty one counts as not set.

    Args:
        kind: The expected type, for pydantic, such as `Rank`.
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
    """Returns a setting, converted to the expected type.

    Args:
        kind: The expected type, for pydantic.
        name: Name of the setting, for messages.
        value: The given value.
        hint: What the user can do.
        strict: Whether to refuse the text of a number.
        is_json: Whether the value is JSON.

    Returns:
        The value.

    Raises:
        ConfigurationError: The value does not fit.

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
    # Outside JSON, a name is the name of one of several types.
    place = ".".join([name, *(str(part) for part in first["loc"] if is_json or isinstance(part, int))])
    wrong = value if first["type"] == "missing" else first["input"]
    raise ConfigurationError(message(f"{place} cannot be used: {what[:1].lower()}{what[1:]}.", hint=hint, **{place: wrong}))


def check_fields(given: Any) -> None:
    """Refuses a dataclass with a field that does not fit its annotation.

    Args:
        given: The dataclass.

    Raises:
        ConfigurationError: A field does not fit.

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
    """Makes the folder of a setting, if it does not exist.

    Args:
        name: Name of the setting, for messages.
        wanted: Path of the folder.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: The folder cannot be made.

    Example:
        >>> made_folder("log_dir", "logs").name
        'logs'
    """
    folder = Path(wanted).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # A ValueError if the name contains a zero byte.
        what = f"Cannot make the folder ({getattr(error, 'strerror', error)})."
        raise ConfigurationError(message(what, hint="name another one.", **{name: str(wanted)})) from None
    return folder


def writable(name: str, wanted: str | os.PathLike[str]) -> Path:
    """Makes the folder of a setting, if it does not exist, and checks that files can be written there.

    Args:
        name: Name of the setting, for messages.
        wanted: Path of the folder.

    Returns:
        Its absolute path.

    Raises:
        ConfigurationError: The folder cannot be made, or is not writable.

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
    """Refuses the address of a folder for backups if TensorFlow has no file system for it.

    Args:
        address: The address, or a path.
        known: The schemes of TensorFlow's file systems.

    Raises:
        ConfigurationError: TensorFlow has none.

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
