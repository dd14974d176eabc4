"""Settings of strategies: arguments of the constructor that are attributes too, and are checked whenever they are set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message


class CheckedSetting:
    """An attribute that is checked whenever it is set, in the constructor and later.

    Args:
        check: Takes the name and a value. Returns the value to keep, or raises a ConfigurationError.
        fixed: Whether it is set once, because the strategy is built on it.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0"], bucket_bytes=1 << 20)
        >>> strategy.bucket_bytes = 0
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: bucket_bytes must be a positive number of bytes. Received: bucket_bytes=0
        Hint: use a whole number, 1 or more.
    """

    def __init__(self, check: Callable[[str, Any], Any] = lambda name, value: value, *, fixed: bool = False) -> None:
        self._check, self._fixed = check, fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, strategy: Any, owner: type | None = None) -> Any:
        if strategy is None:
            return self
        if self._name not in vars(strategy):
            raise AttributeError(f"{self._name} is not set yet")
        return vars(strategy)[self._name]

    def __set__(self, strategy: Any, value: Any) -> None:
        if self._fixed and self._name in vars(strategy):
            raise ConfigurationError(
                message(
                    f"{self._name} cannot change after the strategy is made.",
                    hint="make another strategy with it.",
                    **{self._name: value},
                )
            )
        vars(strategy)[self._name] = self._check(self._name, value)


def positive(unit: str) -> Callable[[str, Any], int]:
    """Returns a check for whole numbers above 0."""

    def check(name: str, value: Any) -> int:
        check_count(f"{name} must be a positive number of {unit}.", **{name: value})
        return value

    return check


def one_of(*names: str) -> Callable[[str, Any], str]:
    """Returns a check for some words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            choice = " or ".join(f'"{each}"' for each in names)
            raise ConfigurationError(message(f"{name} has no such value.", hint=f"use {choice}.", **{name: value}))
        return value

    return check


def or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Returns a check that also allows None."""
    return lambda name, value: None if value is None else check(name, value)


def seconds(name: str, value: Any) -> float:
    """Refuses all but a positive number."""
    check_seconds(**{name: value})
    return value


def flag(name: str, value: Any) -> bool:
    """Refuses all but True and False."""
    if not isinstance(value, bool):
        raise ConfigurationError(message(f"{name} must be True or False.", hint="set one of them.", **{name: value}))
    return value


def function(name: str, value: Any) -> Callable[..., Any]:
    """Refuses what cannot be called."""
    if not callable(value):
        raise ConfigurationError(message(f"{name} must be a function.", hint="pass one, or None.", **{name: value}))
    return value


def functions(name: str, value: Any) -> list[Callable[..., Any]]:
    """Refuses all but a sequence of functions; returns a list of them."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(callable, value)):
        raise ConfigurationError(message(f"{name} must be a list of functions.", hint="pass [] for none.", **{name: value}))
    return list(value)


def mapping(name: str, value: Any) -> dict[Any, Any]:
    """Refuses all but a mapping; returns a copy."""
    if not isinstance(value, Mapping):
        raise ConfigurationError(message(f"{name} must be a dict.", hint="pass {} for none.", **{name: value}))
    return dict(value)
