"""The table of replacements in TensorFlow. An entry acts only where a strategy of this package takes part."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrep_strategy.core.replacements import TENSORFLOW, Replacement, Replacements
from tfrep_strategy.core.tf import (
    Function,
    LoadedFunction,
    MirroredReplicaThread,
    OwnedIterator,
    array_operations,
    autograph_rules,
    cond_v2,
    loops_of_autograph,
    random_generators,
    random_seeds,
    saved_models,
    while_v2,
)
from tfrep_strategy.keras_integration.synchronous.saving import exported_by_one, saved_now, written_by_one
from tfrep_strategy.strategies.in_sync import with_seeds_of_replica
from tfrep_strategy.strategies.one_device import none_in_trace
from tfrep_strategy.strategies.operations import (
    accepting_no_rows,
    with_agreed_branch,
    with_agreed_condition,
    with_own_file,
    with_rounds_in_order,
)
from tfrep_strategy.strategies.partitioned_functions import call_in_scope, loop
from tfrep_strategy.strategies.replica_context import in_caller_state, saving_caller_state
from tfrep_strategy.strategies.variables import with_local_copies

_LOOP = "({}, extra_test, body, get_state, set_state, symbol_names, opts)"


def _unless_ours(rules: Any) -> Any:
    return autograph_rules.DoNotConvert("tfrep_strategy"), *rules


# fmt: off
REPLACED = Replacements(
    TENSORFLOW,
    "TensorFlow",
    "These are functions of modules, and methods of classes that TensorFlow itself creates.",
    (
        Replacement(
            Function, "__call__", "(self, *args, **kwds)", lambda _: call_in_scope,
            "replicas share the work of a function that trains",
        ),
        Replacement(
            loops_of_autograph._registry, tf.data.Dataset, _LOOP.format("ds"), lambda _: loop,
            "a loop over data in a function whose work replicas share becomes a graph loop",
        ),
        Replacement(
            loops_of_autograph._registry, OwnedIterator, _LOOP.format("iter_"), lambda _: loop,
            "the same",
        ),
        Replacement(
            autograph_rules, "CONVERSION_RULES", "", _unless_ours,
            "AutoGraph skips this package, as it skips TensorFlow",
        ),
        Replacement(
            random_seeds, "get_seed", "(op_seed)", with_seeds_of_replica,
            "an operation with a seed draws different numbers on each replica",
        ),
        Replacement(
            random_generators, "get_replica_id", "()", none_in_trace,
            "in a one-device step a `tf.random.Generator` has no replica",
        ),
        Replacement(
            MirroredReplicaThread, "__init__",
            "(self, dist, coord, replica_id, devices, variable_creator_fn, fn, caching_scope, args, kwargs,"
            " thread_local_callables=None)",
            saving_caller_state,
            "the thread of a replica inherits the state of its caller",
        ),
        Replacement(
            MirroredReplicaThread, "run", "(self)", in_caller_state,
            "the same",
        ),
        Replacement(
            cond_v2, "_build_cond",
            "(pred, true_graph, false_graph, true_inputs, false_inputs, building_gradient, add_identities=True,"
            " prevent_lowering=False, name=None)",
            with_agreed_condition,
            "raises an error if replicas of a process choose different branches with a collective",
        ),
        Replacement(
            cond_v2, "_build_case", "(branch_index, branch_graphs, branch_inputs, name=None, lower_using_switch_merge=None)",
            with_agreed_branch,
            "the same",
        ),
        Replacement(
            while_v2, "while_loop",
            "(cond, body, loop_vars, shape_invariants=None, parallel_iterations=10, maximum_iterations=None, name=None,"
            " return_same_structure=True, back_prop=True)",
            with_rounds_in_order,
            "a loop that draws random numbers runs its rounds in order, so that all processes draw the same",
        ),
        Replacement(
            array_operations, "mirror_pad", "(input, paddings, mode, name=None)", accepting_no_rows,
            "pads a replica's part even without rows",
        ),
        Replacement(
            LoadedFunction, "_call_flat", "(self, args, captured_inputs)", with_local_copies,
            "outside of replicas, calls a loaded model with the local copies",
        ),
        Replacement(
            tf.train.Checkpoint, "save", "(self, file_prefix, options=None)", saved_now,
            "with several processes, saves in the foreground",
        ),
        Replacement(
            tf.train.Checkpoint, "_write", "(self, file_prefix, options=None)", lambda write: saved_now(written_by_one(write)),
            "one process writes the path; files are on disk before they get their names",
        ),
        Replacement(
            saved_models, "save", "(obj, export_dir, signatures=None, options=None)", exported_by_one,
            "one process writes the path",
            also=(tf.saved_model,),  # A program that imports this module, as Keras does, gets the replacement.
        ),
        Replacement(
            tf.data.Dataset, "cache", "(self, filename='', name=None)", with_own_file,
            "each process has its own cache file",
        ),
    ),
)
# fmt: on
