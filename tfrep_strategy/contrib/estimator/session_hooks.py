"""Hooks in the shape of `SessionRunHook`. There is no session: what stands in its place knows how far the training is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfrep_strategy.core.old_spellings import ShowsNewNames
from tfrep_strategy.errors import ConfigurationError, HookError, check_count, message
from tfrep_strategy.strategies.groups import process_communicator


class SessionRunArgs(NamedTuple):
    """The values that `before_run` asks for.

    Attributes:
        fetches: A name, or a nest of names: "global_step", "loss", or a metric of the model.

    Example:
        >>> tfrep.estimator.SessionRunArgs({"step": "global_step", "loss": "loss"}).fetches["step"]
        'global_step'
    """

    fetches: Any


class SessionRunValues(NamedTuple):
    """The values that `after_run` gets.

    Attributes:
        results: What `before_run` has asked for, in the same structure; None if it asked for nothing.
    """

    results: Any


class Session(ShowsNewNames):
    """Stands where a hook got a session, a coordinator, or the context of a run.

    Attributes:
        model: The Keras model that is trained or evaluated.
        global_step: How many steps this model was trained, over all calls of `train`.
        stop_requested: Whether a hook has asked for the end.
        original_args: In a run context: what `before_run` has asked for.
    """

    _old_names = dict.fromkeys(("run", "graph"), "there is no session: use session.model, or a Keras callback.")

    def __init__(self, model: Any, global_step: int) -> None:
        self.model, self.global_step = model, global_step
        self.stop_requested = False
        self.original_args: SessionRunArgs | None = None

    @property
    def session(self) -> Session:
        """This object: a run context has a session."""
        return self

    def request_stop(self) -> None:
        """Asks for the end after this step, on all ranks."""
        self.stop_requested = True

    def should_stop(self) -> bool:
        """Returns whether a hook has asked for the end, as a coordinator does."""
        return self.stop_requested


class SessionRunHook:
    """Base of hooks, whose methods do nothing. A hook need not derive from it, and may lack methods.

    Each rank calls its hooks. `session`, `coord` and `run_context` are one object, a `Session`.

    Example:
        >>> class Losses(tfrep.estimator.SessionRunHook):
        ...     def begin(self):
        ...         self.losses = []
        ...     def before_run(self, run_context):
        ...         return tfrep.estimator.SessionRunArgs("loss")
        ...     def after_run(self, run_context, run_values):
        ...         self.losses.append(run_values.results)
        >>> estimator = tfrep.estimator.model_to_estimator(make_model(), "models")
        >>> losses = Losses()
        >>> estimator.train(lambda: (x, y), hooks=[losses], steps=3).latest_checkpoint()
        '...model.ckpt-3'
        >>> len(losses.losses)
        3
    """

    def begin(self) -> None:
        """Is called once, before the first step."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Is called after `begin`, when the model has its weights."""

    def before_run(self, run_context: Any) -> SessionRunArgs | None:
        """Is called before each step, and once more if only the attempt shows that the data has ended."""

    def after_run(self, run_context: Any, run_values: SessionRunValues) -> None:
        """Is called after each step."""

    def end(self, session: Any) -> None:
        """Is called after the last step, if no hook and no step failed."""


class StopAtStepHook(SessionRunHook):
    """Ends the training after `num_steps` more steps, or at the global step `last_step`.

    Raises:
        ConfigurationError: Not exactly one of them is given, as a whole number.

    Example:
        >>> hook = tfrep.estimator.StopAtStepHook(last_step=2)
        >>> tfrep.estimator.model_to_estimator(make_model(), "models").train(lambda: (x, y), hooks=[hook]).latest_checkpoint()
        '...model.ckpt-2'
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ConfigurationError(
                message("One of two numbers ends a training.", hint="give one.", num_steps=num_steps, last_step=last_step)
            )
        name, value = ("last_step", last_step) if num_steps is None else ("num_steps", num_steps)
        check_count("A training ends after some steps.", **{name: value})  # type: ignore[arg-type]
        self._num_steps, self._last_step = num_steps, last_step

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._num_steps is not None:
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: Any, run_values: SessionRunValues) -> None:
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()


class HookCalls:
    """Calls the hooks of this rank. After one has failed no other is called, and the end is requested.

    Args:
        hooks: The hooks.
        session: What they get.

    Attributes:
        hooks: The hooks.
        some_have_hooks: After `begin`: whether a rank has hooks.
    """

    def __init__(self, hooks: Sequence[Any] | None, session: Session) -> None:
        self.hooks, self.session = list(hooks or ()), session
        self.some_have_hooks = False
        self._asked: list[SessionRunArgs | None] = []
        self._failure: tuple[str, Exception] | None = None

    def begin(self) -> None:
        """Calls `begin`, then `after_create_session`. Every process must call it."""
        for hook in self.hooks:
            self._call(hook, "begin")
        for hook in self.hooks:
            self._call(hook, "after_create_session", self.session, self.session)
        self.check()
        self.some_have_hooks, stop = map(any, zip(*self._told((bool(self.hooks), self.session.stop_requested)), strict=True))
        self.session.stop_requested = stop

    def before_run(self) -> None:
        """Calls `before_run`, and notes what the hooks ask for."""
        self._asked = [self._call(hook, "before_run", self._context(None)) for hook in self.hooks]

    def after_run(self, values: Mapping[str, Any]) -> None:
        """Calls `after_run`.

        Args:
            values: The logs of the step, by name.
        """
        named = {**values, "global_step": self.session.global_step}
        for hook, asked in zip(self.hooks, self._asked, strict=True):
            with self._noting_failure(hook, "after_run"):
                run_values = SessionRunValues(None if asked is None else _looked_up(asked.fetches, named))
                self._call(hook, "after_run", self._context(asked), run_values)

    def end(self) -> None:
        """Calls `end`. Every process must call it."""
        for hook in self.hooks:
            self._call(hook, "end", self.session)
        self.check()

    def check(self) -> None:
        """Raises the error of a hook, on all ranks. Every process must call it.

        Raises:
            HookError: A hook failed.
        """
        texts = self._told(self._failure and self._failure[0])
        for rank, text in enumerate(texts):
            if text is not None:
                where = f"On rank {rank}, " if len(texts) > 1 else ""
                raise HookError(where + text) from (self._failure and self._failure[1])

    def _told(self, value: Any) -> list[Any]:
        return process_communicator().all_gather_object(value)

    def _context(self, asked: SessionRunArgs | None) -> Session:
        self.session.original_args = asked
        return self.session

    def _call(self, hook: Any, method: str, *args: Any) -> Any:
        function = getattr(hook, method, None)
        if function is None or self._failure is not None:
            return None
        with self._noting_failure(hook, method):
            return function(*args)
        return None

    @contextlib.contextmanager
    def _noting_failure(self, hook: Any, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            step = self.session.global_step
            text = f"{type(hook).__name__}.{method} raised {type(error).__name__} at global step {step}: {error}"
            self._failure = text, error
            self.session.request_stop()


def _looked_up(fetches: Any, named: Mapping[str, Any]) -> Any:
    for name in keras.tree.flatten(fetches):
        if not isinstance(name, str) or name not in named:
            raise ConfigurationError(message("No step has this value.", hint=f"ask for one of {sorted(named)}.", fetches=name))
    return keras.tree.map_structure(named.__getitem__, fetches)
