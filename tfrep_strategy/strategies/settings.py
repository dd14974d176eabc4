"""Checks when a strategy is made: its settings, and that TensorFlow is not in graph mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, check_count, check_seconds, message, warn


def refuse_graph_mode() -> None:
    """Refuses to make a strategy where TensorFlow does not run eagerly, before an iterator or a session fails.

    Raises:
        ConfigurationError: Eager execution is off, or a `tf.Graph` is the default.

    Example:
        >>> with tf.Graph().as_default():
        ...     refuse_graph_mode()
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: TensorFlow builds graphs for sessions here, as TensorFlow 1 did.
        Hint: leave out tf.compat.v1.disable_v2_behavior(), disable_eager_execution() and `with tf.Graph().as_default()`.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigurationError(
            message(
                "TensorFlow builds graphs for sessions here, as TensorFlow 1 did.",
                hint="leave out tf.compat.v1.disable_v2_behavior(), disable_eager_execution() and `with tf.Graph().as_default()`.",
            )
        )


class CheckedSetting:
    """An attribute that is checked whenever it is set, in the constructor and later.

    Args:
        check: Takes the name and a value. Returns the value to keep, or raises a ConfigurationError.
        fixed: Whether it can be set only once, because the strategy is built on it.
        of_run: Whether the run decides it, and not the script, such as the devices.
        at_first: Whether `take` may set it although it is fixed, because it is not read before a model is built.

    Example:
        >>> strategy = tfrep.MirroredStrategy(["CPU:0"], bucket_bytes=1 << 20)
        >>> strategy.bucket_bytes = 0
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: bucket_bytes must be a positive number of bytes. Received: bucket_bytes=0
        Hint: use a whole number, 1 or more.
    """

    def __init__(
        self,
        check: Callable[[str, Any], Any] = lambda name, value: value,
        *,
        fixed: bool = False,
        of_run: bool = False,
        at_first: bool = False,
    ) -> None:
        self._check, self._fixed, self.of_run, self._at_first = check, fixed, of_run, at_first

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
                    hint="pass it to the constructor.",
                    code="TFREP-E008",
                    **{self._name: value},
                )
            )
        vars(strategy)[self._name] = self._check(self._name, value)

    def take(self, strategy: Any, value: Any) -> None:
        """Sets it on the strategy of a run, which is made before the script asks for one."""
        value = self._check(self._name, value)
        if self._fixed and not self._at_first and value != getattr(strategy, self._name):
            raise ConfigurationError(
                message(
                    f"The run has already made its strategy, so {self._name} cannot change.",
                    hint="leave it out, or start the script with python instead of tfrep run.",
                    code="TFREP-E008",
                    **{self._name: value},
                )
            )
        vars(strategy)[self._name] = value


def take_settings(strategy: Any, made: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Gives the strategy of a run the settings that a script passes to its own strategy.

    Settings that the run decides, such as devices and the communicator, stay as they are. A script that names another
    communicator gets a warning.

    Args:
        strategy: The run's strategy.
        made: The class that the script calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ConfigurationError: A setting has a bad value, or cannot change any more.
        TypeError: The class has no such argument.
    """
    signature = inspect.signature(made)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        asked = inspect.getattr_static(made, name, None)
        if name == "communicator":
            _warn_of_another(strategy, value)
        if value is signature.parameters[name].default or not isinstance(asked, CheckedSetting) or asked.of_run:
            continue
        setting = inspect.getattr_static(type(strategy), name, None)
        if isinstance(setting, CheckedSetting):
            setting.take(strategy, value)
        else:
            warn(
                message(
                    f"The strategy of this run is a {type(strategy).__name__}, which has no setting {name}.",
                    hint="choose another strategy by `tfrep run --strategy`.",
                    **{name: value},
                )
            )


def _warn_of_another(strategy: Any, wanted: Any) -> None:
    """Warns a script whose run uses another communicator than the script names."""
    chosen = getattr(getattr(strategy, "communicator", None), "name", None)
    if isinstance(wanted, str) and chosen is not None and wanted not in ("auto", chosen):
        warn(
            message(
                f"This run uses the communicator {chosen!r}, not the one that the script names.",
                hint=f"start it with `tfrep run --communicator {wanted}`.",
                communicator=wanted,
            ),
        )


def positive(unit: str) -> Callable[[str, Any], int]:
    """Returns a check for whole numbers above 0."""

    def check(name: str, value: Any) -> int:
        check_count(f"{name} must be a positive number of {unit}.", **{name: value})
        return value

    return check


def one_of(*names: str) -> Callable[[str, Any], str]:
    """Returns a check that a value is one of some words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            choice = " or ".join(f'"{each}"' for each in names)
            raise ConfigurationError(message(f"{name} cannot have this value.", hint=f"use {choice}.", **{name: value}))
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
    """Refuses a value that cannot be called."""
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
