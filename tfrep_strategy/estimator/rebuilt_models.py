"""A model of the user, built again where it is to train: weights and settings as they were, variables of the strategy in scope."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration.shared.copied_models import cloned, compile_as, copy_state
from tfrep_strategy.keras_integration.shared.custom_objects import custom_objects_of


def check_model(model: Any) -> None:
    """Refuses what no estimator can be made of.

    Raises:
        ConfigurationError: It is no Keras model, not compiled, or not built.
    """
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            message(
                "An estimator is made of a Keras model.",
                hint="a model_fn becomes a function that makes one; see docs/migration/estimator.md.",
                keras_model=model,
            )
        )
    if not model.compiled:
        raise ConfigurationError(message("The model is not compiled.", hint="call model.compile first.", keras_model=model.name))
    if not model.built:
        hint = "let it begin with keras.Input(shape), or call it on a batch first."
        raise ConfigurationError(message("The model has no weights yet.", hint=hint, keras_model=model.name))


def rebuilt(model: Any, strategy: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """Builds a model again, in the scope of a strategy.

    Args:
        model: A model that is compiled and built. It stays as it is.
        strategy: The strategy; None for one device.
        custom_objects: What Keras cannot find by name, beside what `compile` was given.

    Returns:
        A model with the same weights, and an optimizer that has done no step.

    Raises:
        ConfigurationError: The class of the model cannot be built from its config.
    """
    with scope_of(strategy), keras.saving.custom_object_scope({**custom_objects_of(model), **(custom_objects or {})}):
        try:
            copy = cloned(model)
            if not copy.built:
                copy.build(model.get_build_config()["input_shape"])
            compile_as(model, copy)
        except (NotImplementedError, TypeError, ValueError) as error:
            hint = "give its classes get_config, and its functions names; or write it as keras.Model(inputs, outputs)."
            raise ConfigurationError(
                message(f"The model cannot be built again: {error}", hint=hint, keras_model=model.name)
            ) from error
        copy_state(model, copy)
    if not copy.compiled:
        hint = "override get_compile_config and compile_from_config."
        raise ConfigurationError(message("The model has a compile of its own.", hint=hint, keras_model=model.name))
    return copy


def scope_of(strategy: Any) -> Any:
    """Returns the scope of a strategy; None has one that does nothing."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


class SavedModel:
    """A model built again, with what a checkpoint holds: the model, its optimizer, and the global step.

    Args:
        model: The model of the user.
        strategy: The strategy; None for one device.
        custom_objects: What Keras cannot find by name.

    Attributes:
        model: The model.
        checkpoint: Saves and restores all of it.
    """

    def __init__(self, model: Any, strategy: Any, custom_objects: Mapping[str, Any] | None) -> None:
        self.model = rebuilt(model, strategy, custom_objects)
        with scope_of(strategy):
            self._step = tf.Variable(0, trainable=False, dtype=tf.int64, name="global_step")
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer, global_step=self._step)

    @property
    def global_step(self) -> int:
        """How many steps this model was trained."""
        return int(self._step)

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._step.assign(step)

    def restore(self, path: str | None) -> int:
        """Restores a checkpoint.

        Args:
            path: Its path; None: there is none, and the model stays as it was built.

        Returns:
            The global step.

        Raises:
            ConfigurationError: It is the checkpoint of another model.
        """
        if path is not None:
            try:
                self.checkpoint.restore(path).assert_existing_objects_matched()
            except (AssertionError, ValueError) as error:
                hint = "use another model_dir, or remove the old checkpoints."
                raise ConfigurationError(
                    message("The checkpoint is of another model.", hint=hint, checkpoint=path, keras_model=self.model.name)
                ) from error
        return self.global_step
