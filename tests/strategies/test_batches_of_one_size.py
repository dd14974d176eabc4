"""The scenarios on batches of one size: steps that do not ask about their rows are traced for the rows they have."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import scenarios
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from test_one_device_answer import assert_same, mirrored

from tfrep_strategy.keras_integration.protocol import Step

pytestmark = pytest.mark.lane("rows")

OPEN = {
    "a_model_that_asks_how_many_rows_there_are", "a_single_row", "accuracy_within_a_batch", "added_losses_of_rows",
    "adversarial_rows", "adversarial_rows_of_a_known_number", "all_reduce_in_call", "attention", "branches_of_metrics",
    "checked_numbers", "clipped_and_accumulated", "clipped_by_global_norm", "codebook_of_moving_averages",
    "contrastive_pretraining", "counts_that_replicas_add_up", "custom_loop", "custom_train_step", "embedding_of_positions",
    "embeddings_in_a_clipped_step", "endless_data_in_several_fits", "functions_in_layers", "functions_that_a_step_calls",
    "gan_with_hand_written_means", "gradients_applied_to_an_iterator", "gradients_by_mixed_rows", "gradients_of_each_row",
    "gradients_of_each_row_in_a_map", "gradients_without_a_tape_and_mixed_on_the_way_back", "hard_examples",
    "jacobians_of_errors", "jacobians_of_rows", "labeled_and_unlabeled_rows", "layers_that_mix_rows",
    "lazily_built_subclass", "learning_to_learn", "learning_to_learn_in_two_steps", "logs_computed_from_results_eagerly",
    "logs_computed_from_results_of_metrics", "logs_of_ones_own", "logs_of_several_numbers", "logs_with_rows",
    "loops_behind_mixed_rows", "loops_without_run", "loss_circle_in_a_custom_loop", "loss_none_eagerly",
    "losses_of_some_rows", "losses_that_are_no_means", "losses_that_users_write", "losses_with_collectives",
    "means_over_no_examples", "merged_graphs", "metrics_made_late_and_truths", "metrics_of_features",
    "mixed_rows_before_what_replicas_sum_up", "model_autoencoder_with_add_loss", "model_cells_of_ones_own",
    "model_contrastive", "model_distilled", "model_methods_of_ones_own", "model_nested", "model_quantile_heads",
    "model_shared_layers_and_operations", "model_translator", "model_unit_normalized_metric_learning",
    "moving_averages_of_rows", "optimizers_behind_a_compute_loss", "parts_known_to_be_empty",
    "penalties_beside_a_scaled_loss", "penalty_behind_synchronized_batch_normalization", "penalty_on_gradients_of_inputs",
    "predicted_strings", "products_with_sparse_matrices", "queue_of_features", "reflecting_pads",
    "regularizer_and_add_loss", "rows_mixed_in_loops", "rows_weighed_by_a_network",
    "rows_weighed_by_an_inner_gradient_of_a_mean", "rows_weighed_by_an_inner_gradient_of_a_sum", "run_eagerly",
    "scalars_with_weights", "scaled_losses_of_ones_own", "second_derivatives_of_a_field", "several_gradients_of_one_tape",
    "sharpness_aware_minimization", "sparse_gradients_without_run", "sparse_ragged_and_string_inputs",
    "state_in_losses_and_metrics", "state_that_a_step_assigns", "state_that_no_row_decides",
    "steps_per_execution_of_a_generator", "steps_under_functions", "sums_over_rows_in_a_layer", "sums_over_rows_in_a_step",
    "sums_over_rows_of_batches_of_one_size", "sums_that_a_step_reduces_itself",
    "sums_whose_gradients_pass_through_collectives", "tables_looked_up_with_all_rows_and_by_variables", "truths_of_rows",
    "two_encoders", "two_scaled_optimizers", "updated_by_hand", "updates_if_an_error_is_large",
    "updates_if_the_loss_is_large", "updates_of_several_kinds", "variables_beside_the_scope",
}  # fmt: skip
"""Those with steps, losses or layers of their own, or whose data has no batches of one size, even if rows are left out."""


@pytest.fixture
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the rows that would make a smaller batch at the end, here and on one device."""
    adapt, batch = ArrayDataAdapter.__init__, tf.data.Dataset.batch

    def adapt_whole_batches(self: Any, x: Any, y: Any = None, sample_weight: Any = None, **others: Any) -> None:
        given, size = (x, y, sample_weight), others.get("batch_size") or 32
        rows = len(keras.tree.flatten(x)[0])
        if kept := rows // size * size:
            given = keras.tree.map_structure(lambda array: array[:kept] if kept < rows and array is not None else array, given)
        adapt(self, *given, **others)

    def whole_batches(self: Any, batch_size: Any, drop_remainder: bool = False, **others: Any) -> Any:
        return batch(self, batch_size, drop_remainder or int(self.cardinality()) >= int(batch_size), **others)

    monkeypatch.setattr(ArrayDataAdapter, "__init__", adapt_whole_batches)
    monkeypatch.setattr(tf.data.Dataset, "batch", whole_batches)


@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("name", sorted(scenarios.SCENARIOS))
def test_two_mirrored_replicas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed: list[Step] = []
    monkeypatch.setattr(Step, "__setattr__", _noting(fixed))
    with mirrored(2).scope():
        found = scenarios.run(name)
    assert_same(found, scenarios.run(name), name)
    assert bool(fixed) == (name not in OPEN), "a scenario that keeps its rows open, or no longer does"


def _noting(fixed: list[Step]) -> Any:
    def set_and_note(step: Step, name: str, value: Any) -> None:
        object.__setattr__(step, name, value)
        if name == "rows_are_fixed" and value:
            fixed.append(step)

    return set_and_note
