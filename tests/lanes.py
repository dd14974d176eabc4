"""Which tests `pytest` runs by itself, and which wait for their lane: `pytest -m programs`, `pytest -m "full or not full"`.

`pytest -m quick` runs tests of the short lane and of others, in one process. Who names a file gets all tests in it.

`python tests/lanes.py COMMIT` lists the lanes in the order in which CI takes them on that commit.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Container, Iterable
from pathlib import Path

_TESTS = Path(__file__).parent

LANES = {
    "programs": ("programs/",),
    "keras": ("keras_mirror/",),
    "servers": (
        "running/test_coordinator.py",
        "strategies/test_parameter_server",
        "test_benchmarks_parameter_server.py",
        "test_dataset_creator.py",
        "test_sidecar_evaluator.py",
    ),
    "launchers": (
        "processes/test_forked_ranks.py",
        "processes/test_ranks.py",
        "processes/test_signs_of_life.py",
        "processes/test_watcher.py",
        "running/test_auto.py",
        "running/test_bad_meetings.py",
        "running/test_forks.py",
        "running/test_function.py",
        "running/test_joining.py",
        "running/test_user_variables.py",
        "test_benchmarks.py::test_demo",
        "test_cli.py",
        "test_demo.py",
        "test_docstrings_of_runs.py",
    ),
    "hosts": (
        "running/test_cut_off.py",
        "running/test_hosts.py",
        "running/test_lost_hosts.py",
        "running/test_open_doors.py",
        "running/test_rough_cables.py",
        "running/test_two_hosts.py",
    ),
    "faults": (
        "communicators/peers/test_monitor.py",
        "communicators/test_tf_collective.py::test_a_process_comes_late",
        "communicators/test_tf_collective.py::test_a_rank_ends",
        "communicators/test_tf_collective.py::test_another_program",
        "communicators/test_tf_collective.py::test_the_address_of_another_rank",
        "communicators/test_tf_collective.py::test_the_limit_of_a_meeting[1",
        "faults/",
        "keras_integration/test_first_use.py",
        "keras_integration/test_kills.py",
        "running/test_backed_up_runs.py",
        "running/test_backups_at_addresses.py",
        "running/test_cut_off_hosts.py",
        "running/test_elastic_runs.py",
        "running/test_garbage.py",
        "running/test_restarts.py",
        "running/test_together.py",
        "strategies/test_late_strategy.py",
        "strategies/test_peer_failure.py",
        "tensorflow_integration/test_pipelines_at_exit.py",
    ),
    "engines": ("engines/",),
    "gpus": ("gpu/", "strategies/test_nccl_graph.py", "test_horovod_build.py"),
    "benchmarks": ("test_benchmarks.py",),
    "collectives": (
        "collectives/test_collectives.py",
        "collectives/test_differing_processes.py",
        "collectives/test_errors.py",
    ),
    "migration": (
        "estimator/test_estimator_on_ranks.py",
        "estimator/test_input_functions.py::test_a_shuffle",
        "estimator/test_input_functions.py::test_each_replica_takes_a_batch_of_its_own[1",
        "estimator/test_input_functions.py::test_each_replica_takes_a_batch_of_its_own[2-input_fn_of_process]",
        "estimator/test_input_functions.py::test_tensors",
        "estimator/test_model_estimator.py",
        "estimator/test_run_config.py::test_parameter_servers",
        "estimator/test_train_and_evaluate.py",
        "migration/",
        "test_old_spellings.py::test_graph_mode_is_refused",
        "test_old_spellings.py::test_optimizers_and_callbacks_of_horovod",
        "test_old_spellings.py::test_parameter_servers_show_new_lines",
    ),
    "loops": ("strategies/test_custom_loops.py", "strategies/test_threads.py", "test_replicator.py"),
    "input": ("pipelines/test_shared_reading.py", "strategies/test_distributed_input.py", "test_data.py"),
    "callbacks": (
        "callbacks/",
        "keras_integration/test_background.py",
        "keras_integration/test_backups.py",
        "keras_integration/test_callbacks.py",
        "keras_integration/test_exports.py",
        "keras_integration/test_full_disks.py",
        "keras_integration/test_generations.py",
        "keras_integration/test_messages.py",
        "keras_integration/test_run_backups.py",
        "keras_integration/test_saving.py",
        "keras_integration/test_timed_checkpoint.py",
        "keras_integration/test_warnings.py",
        "keras_integration/test_whole_files.py",
        "tensorflow_integration/test_delayed_restorations.py",
    ),
    "rows": (
        "keras_integration/test_compared_rows.py::test_what_compares_rows_is_computed_from_all[one alone",
        "keras_integration/test_compared_rows.py::test_what_compares_rows_is_computed_from_all[three",
        "keras_integration/test_compared_rows_of_keras.py",
        "keras_integration/test_empty_parts.py",
        "keras_integration/test_every_layer.py",
        "keras_integration/test_every_operation.py",
        "strategies/test_batches_of_one_size.py",
    ),
    "ragged": (
        "keras_integration/test_ragged_rows.py::test_two_replicas[d",
        *(
            f"keras_integration/test_ragged_rows.py::test_two_replicas[{name}"
            for name in ("first", "how many", "ids", "kinds", "l", "masked", "mean", "sorted", "sums", "times")
        ),
        "keras_integration/test_ragged_rows.py::test_xla_and_what_values_decide_the_shape_of[kinds",
        "keras_integration/test_ragged_rows.py::test_xla_and_what_values_decide_the_shape_of[sums",
        "keras_integration/test_losses_of_replicas.py::test_added_losses_are_those_of_one_device[a",
        "keras_integration/test_losses_of_replicas.py::test_added_losses_are_those_of_one_device[before",
        "keras_integration/test_losses_of_replicas.py::test_added_losses_are_those_of_one_device[dice-2",
        "keras_integration/test_losses_of_replicas.py::test_added_losses_are_those_of_one_device[twice-2",
    ),
    "resumed": (
        "keras_integration/test_fit_descriptions.py::test_an_ordinary_program_repeats_nothing",
        *(
            f"keras_integration/test_resumed_fits.py::test_a_resumed_fit[{name}"
            for name in ("a_", "generated", "metrics", "noise", "shuffled", "stateful", "unseeded", "validation")
        ),
    ),
    "wires": (
        "communicators/peers/test_checked.py::test_debug_checks_what_runs_in_functions[horovod",
        "communicators/peers/test_checked.py::test_debug_names_who_has_not_called",
        "communicators/test_bucket_size.py::test_more_replicas",
        "communicators/test_compression.py::test_as_many_digits",
        "communicators/test_compression.py::test_gathered_rows",
        "communicators/test_compression.py::test_half_the_bytes",
        "communicators/test_compression.py::test_training_on_devices",
        "communicators/test_compression.py::test_training_is_near_that_of_one_device[shared",
        "communicators/test_defaults.py::test_a_transport",
        "communicators/test_defaults.py::test_horovod",
        "communicators/test_defaults.py::test_tensorflows_ring",
        "communicators/test_grid.py::test_members",
        "communicators/test_own.py::test_an_installed_transport",
        "communicators/test_pipelining.py::test_a_sum_overlaps_the_backward_pass[shared",
        "communicators/test_pipelining.py::test_order_of_collectives[horovod",
        "strategies/test_common_memory.py::test_two_processes[c",
        "strategies/test_common_memory.py::test_two_processes[s",
        "strategies/test_common_strategy.py::test_processes[horovod",
        "strategies/test_several_strategies.py::test_a_strategy_that_only_one_rank_has_forgotten[shared",
        "strategies/test_several_strategies.py::test_a_strategy_that_only_one_rank_has_forgotten[tf",
        "strategies/test_several_strategies.py::test_steps_of_several_strategies_interleave[shared",
    ),
    "package": (
        "processes/test_cores.py",
        "test_docstrings.py",
        "test_doctor.py::test_it_",
        "test_doctor.py::test_self_test",
        "test_leaks.py",
        "test_package.py",
        "test_readme.py::test_python_blocks",
        "test_workers.py",
    ),
    "optimizers": (
        "keras_integration/test_every_optimizer.py::test_two_processes",
        "keras_integration/test_every_optimizer.py::test_two_replicas",
    ),
    "sharded": (
        "keras_integration/test_every_sharded_optimizer.py",
        "keras_integration/test_sharded_optimizer.py::test_an_optimizer_of_ones_own",
        "keras_integration/test_sharded_optimizer.py::test_gradients_that_somebody_looks_at_are_whole",
        "keras_integration/test_sharded_optimizer.py::test_slots_take_their_part_of_the_memory[Lamb",
        "keras_integration/test_sharded_optimizer.py::test_two_mirrored_replicas[Muon",
        "keras_integration/test_sharded_optimizer.py::test_two_mirrored_replicas[loss_scale",
        "keras_integration/test_sharded_optimizer.py::test_two_replicas_give_the_same_bits",
    ),
    "transports": (
        "communicators/peers/test_checked.py::test_debug_names_who_has_not_called[horovod",
        "communicators/peers/test_checked.py::test_eager_collectives_that_differ[dtype-words1-horovod",
        "communicators/peers/test_checked.py::test_eager_collectives_that_differ[kind-words2-tf",
        "communicators/peers/test_checked.py::test_objects_that_are_gathered_for_different_ends[tf",
        "keras_integration/test_same_data.py::test_different_arrays_are_refused_on_all_ranks[tf",
        "keras_integration/test_same_data.py::test_different_pipelines_are_refused_on_all_ranks[horovod",
        "keras_integration/test_same_data.py::test_different_steps_are_refused_on_all_ranks[horovod",
        "keras_integration/test_same_data.py::test_each_way_out_trains_on_the_data_of_all_ranks[tf",
        "keras_integration/test_session.py::test_processes_stay_in_scope[tf",
        "strategies/test_promises_of_variables.py::test_processes[tf",
        "strategies/test_sync_check.py::test_processes[horovod",
    ),
    "notebooks": (
        "test_notebooks.py",
        "test_site.py::test_pages",
        "examples/test_folders.py::test_retinas_take_some_learning",
        "examples/test_pretrained.py::test_the_weights_of_a_file",
    ),
    "profiles": ("profiles/test_requests.py", "running/test_profile.py"),
    "drawn": (
        "keras_integration/test_drawn_values.py::test_drawn_values[150",
        "pipelines/test_own_part.py::test_drawn_pipelines[400",
        "strategies/test_property.py",
        "test_validation.py::test_any_setting_is_taken_or_refused[many-",
    ),
    "scenarios": (),
    "versions": (),
}
"""Lanes, and the beginnings of the ids of their tests. What is in none belongs to the short lane.

`transports` has what does not depend on the transport, and runs over the other one in the short lane. Those of `scenarios` are
chosen below. Those of `versions` are sessions of `noxfile.py`.
"""

_KINDS = ("mirrored", "tf", "horovod")

_HALVES = tuple(f"{kind}_{half}" for kind in _KINDS for half in (1, 2))

SPLIT = {"programs": _KINDS, "scenarios": _HALVES, "versions": ("oldest", "colab")}
"""Lanes that are too long for one go, and their parts: `programs_tf`."""

QUICK = (
    "collectives/test_collectives.py::test_as_on_one_device[mirrored-3-forward-function",
    "collectives/test_collectives.py::test_in_fit_with_uneven_batches[mirrored-2",
    "collectives/test_errors.py::test_calls_differ",
    "collectives/test_errors.py::test_no_such_root_or_member",
    "collectives/test_errors.py::test_structures_differ[",
    "communicators/test_defaults.py",
    "communicators/test_own.py::test_names",
    "communicators/test_own.py::test_three_methods",
    "communicators/peers/test_monitor.py::test_all_hear_how_a_rank_ended",
    "communicators/peers/test_monitor.py::test_different_calls_are_listed[True-other0",
    "environments/",
    "estimator/test_input_functions.py",
    "estimator/test_model_estimator.py",
    "estimator/test_run_config.py",
    "estimator/test_session_hooks.py",
    "callbacks/test_learning_rate.py",
    "callbacks/test_throughput.py",
    "examples/",
    "keras_integration/test_callbacks.py",
    "keras_integration/test_downloads.py",
    "keras_integration/test_empty_parts.py::test_one_row_eagerly",
    "keras_integration/test_layers.py",
    "keras_integration/test_saving.py::test_mirrored_files_load_anywhere[2",
    "keras_integration/test_session.py",
    "keras_integration/test_thread_state.py",
    "keras_integration/test_timed_checkpoint.py",
    "keras_integration/test_xla.py::test_auto_is_what_it_is_on_one_device",
    "keras_integration/test_xla.py::test_what_cannot_be_compiled_is_said_and_runs",
    "keras_integration/test_xla.py::test_what_is_marked_for_xla",
    "processes/test_announced.py",
    "processes/test_identity.py",
    "profiles/test_times.py",
    "profiles/test_wanted.py",
    "rendezvous/",
    "running/test_failures.py",
    "running/test_scope.py",
    "running/test_stand_ins.py",
    "strategies/test_common_strategy.py::test_replicas_of_one_process[2",
    "strategies/test_distributed_input.py",
    "strategies/test_logical_devices.py",
    "strategies/test_parameter_server_clusters.py::test_a_bad_cluster_is_refused_before_anybody_is_waited_for",
    "strategies/test_parameter_server_clusters.py::test_a_tf_config_that_cannot_be_read_is_shown",
    "strategies/test_settings.py",
    "strategies/test_sync_check.py",
    "strategies/test_variables.py",
    "test_batches.py",
    "test_cli.py::test_bad_input",
    "test_counts.py",
    "test_data.py::test_one_process_shuffles_as_it_likes",
    "test_dataset_creator.py",
    "test_devices.py",
    "test_digits.py",
    "test_doctor.py::test_healthy",
    "test_fingerprints.py",
    "test_gradients.py",
    "test_horovod_build.py::test_first_error",
    "test_horovod_build.py::test_the_source_is_changed",
    "test_imports.py",
    "test_lanes.py",
    "test_leaks.py",
    "test_limits.py",
    "test_notebooks.py::test_as_committed",
    "test_old_spellings.py",
    "test_readme.py::test_linked_files_exist",
    "test_readme.py::test_run_lines_parse",
    "test_replicator.py",
    "test_shares.py",
    "test_sidecar_evaluator.py::test_bad_settings",
    "test_sidecar_evaluator.py::test_whole_models_and_a_file_that_is_still_written",
    "test_transports.py",
    "test_validation.py",
)
"""The beginnings of the ids of the tests of `pytest -m quick`. Those that need processes over a communicator are left out."""

NOT_QUICK = (
    "callbacks/test_throughput.py::test_every_example_counts[mirrored-1",
    "callbacks/test_throughput.py::test_every_example_counts[one device-1",
    "callbacks/test_throughput.py::test_every_example_counts[stock-",
    "estimator/test_input_functions.py::test_a_shuffle",
    "estimator/test_input_functions.py::test_each_replica_takes_a_batch_of_its_own[1",
    "estimator/test_input_functions.py::test_each_replica_takes_a_batch_of_its_own[2-input_fn_of_process",
    "estimator/test_model_estimator.py::test_a_run_makes_no_backups",
    "estimator/test_model_estimator.py::test_checkpoints_by_the_clock",
    "estimator/test_model_estimator.py::test_each_call_goes_on",
    "estimator/test_model_estimator.py::test_export",
    "estimator/test_model_estimator.py::test_the_checkpoint_is_one_of_tensorflow",
    "estimator/test_run_config.py::test_parameter_servers",
    "examples/test_folders.py::test_retinas_take_some_learning",
    "communicators/test_defaults.py::test_replicas_of_one_process[apart",
    "communicators/test_defaults.py::test_replicas_of_one_process[together",
    "keras_integration/test_thread_state.py::test_a_variational_autoencoder_trains",
    "strategies/test_distributed_input.py::test_a_loop_that_python_would_unroll_for_ever",
    "strategies/test_distributed_input.py::test_loops_in_functions",
    "strategies/test_one_device_answer.py::test_other_numbers_of_mirrored_replicas[cnn_",
    "strategies/test_one_device_answer.py::test_other_numbers_of_mirrored_replicas[masked_",
    "strategies/test_one_device_answer.py::test_two_mirrored_replicas[convolutions_of_no_rows",
    "strategies/test_one_device_answer.py::test_two_mirrored_replicas[metrics_of_all_kinds",
    "strategies/test_one_device_answer.py::test_two_mirrored_replicas[model_",
    "strategies/test_one_device_answer.py::test_two_mirrored_replicas[unrolled_",
    "strategies/test_settings.py::test_settings_of_parameter_servers",
    "test_devices.py::test_what_a_process_takes_of_the_gpus_that_it_sees",
    "test_old_spellings.py::test_graph_mode_is_refused",
    "test_old_spellings.py::test_optimizers_and_callbacks_of_horovod",
    "test_old_spellings.py::test_parameter_servers_show_new_lines",
    "test_replicator.py::test_classification_with_sharded_pipelines",
    "test_replicator.py::test_replicators_without_their_hardware",
    "test_transports.py::test_what_horovods_library_has_is_what_horovod_says",
    "test_validation.py::test_any_setting_is_taken_or_refused[many-",
)
"""Those among them that take many seconds, or start a process with TensorFlow."""

MANY_PROCESSES = ("collectives/test_collectives.py", "strategies/test_one_device_answer.py")
"""Modules that use pools of more than two processes, too."""


def lane_of(path: Path, name: str) -> str | None:
    """Returns the lane that a test waits for, or the part of a lane; None for those of the short lane.

    Args:
        path: Of its module.
        name: With its parameters, such as `test_two_processes[tf-adam]`.
    """
    within = path.relative_to(_TESTS).as_posix()
    if within == "strategies/test_one_device_answer.py":
        half = 1 + _drawn(name) // len(_KINDS) % 2
        return None if half == 1 and _kind(name) == _chosen_kind(name) else f"scenarios_{_kind(name)}_{half}"
    lane = next((lane for lane, beginnings in LANES.items() if f"{within}::{name}".startswith(beginnings)), None)
    return f"{lane}_{_kind(name)}" if lane in SPLIT else lane


def is_quick(path: Path, name: str, fixtures: Container[str]) -> bool:
    """Returns whether a test belongs to `pytest -m quick`, which runs in one process.

    Args:
        path: Of its module.
        name: With its parameters.
        fixtures: The names of its fixtures.
    """
    within = path.relative_to(_TESTS).as_posix()
    if "worker_pool" in fixtures and not name.partition("[")[2].startswith(("mirrored", "one-", "alone")):
        return False
    test = f"{within}::{name}"
    is_scenario = within == "strategies/test_one_device_answer.py" and lane_of(path, name) is None
    return (is_scenario or test.startswith(QUICK)) and not test.startswith(NOT_QUICK)


def place(path: Path, fixtures: Iterable[str]) -> int:
    """Returns which place a module has among the others, so that each pool of processes starts once.

    Args:
        path: Of the module.
        fixtures: The names of the fixtures of its tests.
    """
    if path.relative_to(_TESTS).as_posix() in MANY_PROCESSES:
        return 2
    return int("worker_pool" in fixtures)


def _kind(name: str) -> str:
    return next((kind for kind in _KINDS[1:] if f"[{kind}-" in name or f"-{kind}]" in name), "mirrored")


def _chosen_kind(name: str) -> str:
    """Returns the one kind of replicas on which the short lane runs a scenario, if it does."""
    if name.startswith("test_four_processes"):
        return "horovod"  # All in one pool.
    return _KINDS[_drawn(name) % len(_KINDS)]


def _drawn(name: str) -> int:
    """Returns a number for the scenario of a test, the same for all kinds of replicas."""
    scenario = name.partition("[")[2].removesuffix("]").removeprefix("tf-").removeprefix("horovod-")
    return zlib.crc32(scenario.encode())


def all_lanes() -> list[str]:
    """Returns the names of all lanes, of those that are split each part."""
    return [f"{lane}_{part}" if part else lane for lane in LANES for part in SPLIT.get(lane, ("",))]


def in_order(commit: str) -> list[str]:
    """Returns the lanes, starting with another one on each commit."""
    lanes = all_lanes()
    first = zlib.crc32(commit.encode()) % len(lanes)
    return lanes[first:] + lanes[:first]


if __name__ == "__main__":
    print(*in_order(sys.argv[1]))
