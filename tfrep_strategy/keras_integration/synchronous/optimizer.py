"""Aggregate first: an optimizer sees the global gradient before it checks, clips, accumulates or applies anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfrep_strategy.errors import warn
from tfrep_strategy.gradients import dense
from tfrep_strategy.keras_integration.internals import BaseOptimizer
from tfrep_strategy.keras_integration.protocol import current_share
from tfrep_strategy.keras_integration.settings import Setting
from tfrep_strategy.keras_integration.shared import made_in_scope, old_objects
from tfrep_strategy.keras_integration.synchronous.assigned_values import assigns_as_is
from tfrep_strategy.keras_integration.synchronous.base import overwrites
from tfrep_strategy.keras_integration.synchronous.layers import creates_partial_sums
from tfrep_strategy.keras_integration.synchronous.sharded_updates import ShardedUpdates, update_each

_OUTSIDE_REPLICAS = (
    "An optimizer is applied outside `strategy.run`. Gradients that are computed there too are those of the whole batch: right, but"
    " no faster than one device.\n"
    "Hint: make the step a `@tf.function`, called in the scope with the same batches on all ranks. Replicas then share its work."
)

_applied_gradients: Setting[str | None] = Setting(None)
"""What this replica's thread applies: nothing, "global" gradients, or "local" ones, which become global."""

_updated_variables: Setting[Sequence[Any]] = Setting(())
"""Whose gradients an update clips."""

_builds_inner = Setting(False)
"""Whether this thread builds an optimizer that another one wraps."""


class Updates(ShardedUpdates):
    """What optimizers do, in the order of a step."""

    def build_optimizer(self, original: Any, optimizer: Any, variables: Any) -> None:
        """Refuses, in a loop of the user's own too, to optimize what the strategy in scope has not made, and to sum twice."""
        old_objects.refuse_old_optimizer(optimizer, "A step")
        if self.has_several:
            made_in_scope.refuse_foreign_variables(variables, self.strategy)
            made_in_scope.refuse_foreign_optimizer(optimizer, self.strategy)
        if self.shards:
            self.strategy.extended.synchronize_new_variables()  # A slot may begin as its variable.
            self.deal_out(optimizer, variables)
        original(optimizer, variables)

    def build_loss_scaling(self, original: Any, optimizer: Any, var_list: Any) -> None:
        """Notes that optimizers inside are built for global gradients."""
        if self.has_several:
            made_in_scope.refuse_foreign_optimizer(optimizer, self.strategy)
        with _builds_inner.to(True):
            original(optimizer, var_list)

    def add_slot(self, original: Any, optimizer: Any, reference_variable: Any, name: Any = None, **kwargs: Any) -> Any:
        """Lets accumulators of gradients hold a part of the sum on each process, and sharded slots a part of the whole."""
        accumulates = name == "gradient_accumulator" and self._accumulates_locally(optimizer)
        accumulates = accumulates and not _builds_inner.value  # That one gets gradients which are global already.
        accumulates = accumulates and not overwrites(reference_variable)  # So are largest values.
        cut = self.cut_of_slot(optimizer, reference_variable, name)
        with creates_partial_sums.to(accumulates), self.strategy.extended.cut_of_new_variables.to(cut):
            return original(optimizer, reference_variable, name=name, **kwargs)

    def apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Makes the gradients global, then lets every replica do the update that one device would do."""
        with assigns_as_is.to(True):
            return self._apply(original, optimizer, grads, trainable_variables)

    def _apply(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
        strategy = self.strategy
        if _applied_gradients.value is not None:
            return original(optimizer, grads, trainable_variables)
        if not self.in_replica:
            if self.has_several:
                warn(_OUTSIDE_REPLICAS)
            with _applied_gradients.to("global"):
                return original(optimizer, strategy.extended.mean_over_processes(list(grads)), trainable_variables)
        grads = list(grads)
        trainable_variables = None if trainable_variables is None else list(trainable_variables)  # It may be an iterator.
        if not grads:
            return original(optimizer, grads, trainable_variables)
        whole = self.what_overwrites(grads, trainable_variables or optimizer._trainable_variables)
        grads = [None if i in whole else gradient for i, gradient in enumerate(grads)]

        def with_whole(gradients: Sequence[Any]) -> list[Any]:
            return [whole.get(i, gradient) for i, gradient in enumerate(gradients)]

        if self._accumulates_locally(optimizer):
            own = _weighed([dense(g) for g in grads])  # Keras collects in dense variables.
            with _applied_gradients.to("local"):
                return original(optimizer, with_whole(own), trainable_variables)
        with _applied_gradients.to("global"):
            summed = strategy.extended.aggregate_gradients(_weighed(grads))
            return original(optimizer, with_whole(summed), trainable_variables)

    def apply_scaled(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Makes an overflow on one replica an overflow of the global gradient, which all replicas skip.

        Then goes on as on one device: Keras's own function coordinates replicas, and refuses to work outside them.
        """
        return self.apply(type(optimizer)._common_apply, optimizer, grads, trainable_variables)

    def apply_to_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
        """Notes whose gradients an update clips."""
        with _updated_variables.to(tuple(trainable_variables)):
            original(optimizer, grads, trainable_variables)

    def accumulate_gradients(self, original: Any, optimizer: Any, grads: Any, acc_grads: Any) -> None:
        """Adds to the accumulators as on one device: what a replica accumulates is a part of the sum."""
        BaseOptimizer._backend_increment_gradient_accumulators(optimizer, grads, acc_grads)

    def clip_gradients(self, original: Any, optimizer: Any, grads: Any) -> Any:
        """Makes accumulated gradients global, and transforms them, before anything looks at them: an update begins here."""
        applied, strategy = _applied_gradients.value, self.strategy
        if applied is None:
            return original(optimizer, grads)
        if applied == "local":
            grads = strategy.extended.aggregate_gradients(list(grads))
        with _applied_gradients.to("global"):
            return original(optimizer, strategy.extended.transform_gradients(list(grads), _updated_variables.value))

    def update_variables(self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Updates all of each variable on each replica, or the replica's part if the optimizer's state is sharded."""
        if self.shards and self.in_replica:
            self.update_in_parts(optimizer, grads, trainable_variables, learning_rate, are_parts=False)
        else:
            update_each(optimizer, grads, trainable_variables, learning_rate)

    def _accumulates_locally(self, optimizer: Any) -> bool:
        """Whether replicas collect gradients of their own and talk only on the steps that update.

        That needs a collective inside `tf.cond`. Within one process all steps aggregate, which costs no message.
        """
        return bool(optimizer.gradient_accumulation_steps) and self.strategy.extended.collectives_in_branches


def _weighed(grads: list[Any]) -> list[Any]:
    """Weighs gradients by the replica's share, in a step that weighs by examples."""
    share = current_share()
    return grads if share is None else [share.weigh(g) for g in grads]
