"""Imports the private TensorFlow names that this package uses. No other module imports private names.

All names are checked at import. One error lists the names that a TensorFlow release has moved.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.replacements import TENSORFLOW, private

TENSORFLOW.refuse_older(tf.__version__)
_misfits: list[str] = []


def _private(module: str, name: str, package: str = "tensorflow.python") -> Any:
    return private(f"{package}.{module}", name, misfits=_misfits)


# Strategies.
MirroredExtended = _private("distribute.mirrored_strategy", "MirroredExtended")
OneDeviceExtended = _private("distribute.one_device_strategy", "OneDeviceExtended")
MirroredReplicaContext = _private("distribute.mirrored_run", "_MirroredReplicaContext")
MirroredReplicaThread = _private("distribute.mirrored_run", "_MirroredReplicaThread")
ReplicaContext = _private("distribute.distribute_lib", "ReplicaContext")
sync_on_read_context = _private("distribute.distribute_lib", "_variable_sync_on_read_context")
ValueContext = _private("distribute.distribute_lib", "ValueContext")
UpdateContext = _private("distribute.distribute_lib", "UpdateContext")
DefaultDistributionExtended = _private("distribute.distribute_lib", "_DefaultDistributionExtended")
_push_mode = _private("distribute.distribute_lib", "_push_per_thread_mode")
_pop_mode = _private("distribute.distribute_lib", "_pop_per_thread_mode")
_default_replica_mode = _private("distribute.distribute_lib", "_get_default_replica_mode")
ReductionToOneDevice = _private("distribute.cross_device_ops", "ReductionToOneDevice")
NcclAllReduce = _private("distribute.cross_device_ops", "NcclAllReduce")

# NCCL between the GPUs of one process.
nccl_all_sum = _private("ops.nccl_ops", "all_sum")
operation_definition = _private("framework.op_def_registry", "get")

operations_are_deterministic = _private("util._pywrap_determinism", "is_enabled")

# Values.
DistributedValues = _private("distribute.values", "DistributedValues")
DistributedVariable = _private("distribute.values", "DistributedVariable")
MirroredVariable = _private("distribute.values", "MirroredVariable")
SyncOnReadVariable = _private("distribute.values", "SyncOnReadVariable")
PerReplica = _private("distribute.values", "PerReplica")
PerReplicaSpec = _private("distribute.values", "PerReplicaSpec")
is_mirrored = _private("distribute.distribute_utils", "is_mirrored")
regroup = _private("distribute.distribute_utils", "regroup")
in_replica_update_context = _private("distribute.values_util", "in_replica_update_context")
stands_for_its_copies = _private("distribute.values_util", "is_saving_non_distributed")
value_container = _private("distribute.distribute_utils", "value_container")

# The graph with the scopes that are open outside functions.
default_graph_stack = _private("framework.ops", "_default_graph_stack")

# Whether a gradient tape of this thread records.
tape_may_record = _private("eager.record", "could_possibly_record")

# The class of the results of `tf.function`.
Function = _private("eager.polymorphic_function.polymorphic_function", "Function")

# Chooses the seeds of random operations.
random_seeds = _private("framework", "random_seed")
_private("framework.random_seed", "get_seed")

# Draws different numbers on each replica, for a `tf.random.Generator` that was made in a scope.
random_generators = _private("ops", "stateful_random_ops")
_private("ops.stateful_random_ops", "get_replica_id")

# Custom gradients with fewer operations than `tf.custom_gradient`, which only tapes know.
record_operation = _private("eager.record", "record_operation")
stop_recording = _private("eager.record", "stop_recording")

# Graphs of branches and loop bodies.
BranchGraph = _private("ops.control_flow_v2_func_graphs", "ControlFlowFuncGraph")
CondGradientGraph = _private("ops.cond_v2", "_CondGradFuncGraph")
cond_v2 = _private("ops", "cond_v2")
_WITH_FUNCTIONS = {
    "Case", "If", "PartitionedCall", "StatefulPartitionedCall", "StatelessCase", "StatelessIf", "StatelessWhile", "While",
}  # fmt: skip
_private("ops.cond_v2", "_build_cond")
_private("ops.cond_v2", "_build_case")
while_v2 = _private("ops", "while_v2")
_private("ops.while_v2", "while_loop")
LEGACY_DRAWS = _private("framework.auto_control_deps", "LEGACY_RANDOM_OPS")  # A graph does not order them.
array_operations = _private("ops", "gen_array_ops")
_private("ops.gen_array_ops", "mirror_pad")
_private("ops.parallel_for.control_flow_ops", "_pfor_impl")

# The tracing of `tf.function`.

trace = _private("framework.func_graph", "func_graph_from_py_func")


def add_function(definition: Any) -> None:
    """Registers a `FunctionDef`, for eager code and all graphs."""
    context().add_function_def(definition)


_graph_of_function = _private("framework.function_def_to_graph", "function_def_to_graph")


def function_graph(name: str) -> Any:
    """Returns a registered function as a `FuncGraph`."""
    with tf.init_scope():
        return _graph_of_function(context().get_function_def(name))


def remove_function(name: str) -> None:
    """Forgets a registered `FunctionDef`."""
    if context().has_function(name):
        context().remove_function(name)


_unwrap = _private("util.tf_decorator", "unwrap")

autograph_rules = _private("autograph.core", "config")
_private("autograph.core.config", "CONVERSION_RULES")
autograph_status = _private("autograph.core", "ag_ctx")
autograph_convert = _private("autograph.impl.api", "tf_convert")

_traced = _private("profiler.trace", "enabled")

# XLA: the names of the operations that it can compile.
xla_cpu_kernel_names = _private("util.pywrap_xla_ops", "get_cpu_kernel_names")
xla_gpu_kernel_names = _private("util.pywrap_xla_ops", "get_gpu_kernel_names")
set_lazy_xla = _private("client.pywrap_tf_session", "TF_SetXlaEnableLazyCompilation")  # It returns what was set.

# Loops in functions, by the type of their iterable.
loops_of_autograph = _private("autograph.operators.control_flow", "for_loop_registry")

# Input.
auto_shard_dataset = _private("distribute.input_ops", "auto_shard_dataset")
OwnedIterator = _private("data.ops.iterator_ops", "OwnedIterator")
OwnedMultiDeviceIterator = _private("data.ops.multi_device_iterator_ops", "OwnedMultiDeviceIterator")
dataset_from_tensors = _private("data.util.structure", "from_tensor_list")
dataset_to_tensors = _private("data.util.structure", "to_tensor_list")


class dataset_kinds:  # noqa: N801 It is used like a module.
    """The classes of data sets, by the methods that make them."""

    Batch = _private("data.ops.batch_op", "_BatchDataset")
    Cache = _private("data.ops.cache_op", "CacheDataset")
    Chosen = _private("data.ops.directed_interleave_op", "_DirectedInterleaveDataset")
    Map = _private("data.ops.map_op", "_MapDataset")
    Options = _private("data.ops.dataset_ops", "_OptionsDataset")
    PaddedBatch = _private("data.ops.padded_batch_op", "_PaddedBatchDataset")
    ParallelBatch = _private("data.ops.batch_op", "_ParallelBatchDataset")
    ParallelInterleave = _private("data.ops.interleave_op", "_ParallelInterleaveDataset")
    ParallelMap = _private("data.ops.map_op", "_ParallelMapDataset")
    Prefetch = _private("data.ops.prefetch_op", "_PrefetchDataset")
    Repeat = _private("data.ops.repeat_op", "_RepeatDataset")
    Shuffle = _private("data.ops.shuffle_op", "_ShuffleDataset")
    Skip = _private("data.ops.skip_op", "_SkipDataset")
    Take = _private("data.ops.take_op", "_TakeDataset")
    Unchanged = _private("data.ops.dataset_ops", "UnaryUnchangedStructureDataset")
    Tensor = _private("data.ops.from_tensors_op", "_TensorDataset")
    Zip = _private("data.ops.zip_op", "_ZipDataset")


enumerate_registry = _private("autograph.operators.py_builtins", "enumerate_registry")
zip_registry = _private("autograph.operators.py_builtins", "zip_registry")

# Parameter servers.
ParameterServerExtended = _private("distribute.parameter_server_strategy_v2", "ParameterServerStrategyV2Extended")
Closure = _private("distribute.coordinator.cluster_coordinator", "Closure")
is_server_failure = _private("distribute.coordinator.cluster_coordinator", "_is_ps_failure")
RemoteValueImpl = _private("distribute.coordinator.values", "RemoteValueImpl")
PerWorkerValues = _private("distribute.coordinator.values", "PerWorkerValues")
ShardedVariable = _private("distribute.sharded_variable", "ShardedVariable")
BaseResourceVariable = _private("ops.resource_variable_ops", "BaseResourceVariable")
ResourceVariable = _private("ops.resource_variable_ops", "ResourceVariable")
CachingVariable = _private("distribute.ps_values", "CachingVariable")
AggregatingVariable = _private("distribute.ps_values", "AggregatingVariable")
anonymous_name = _private("eager.context", "anonymous_name")
executor_scope = _private("eager.context", "executor_scope")
new_executor = _private("eager.executor", "new_executor")
UninitializedVariable = _private("ops.resource_variable_ops", "UninitializedVariable")
variable_handle = _private("ops.resource_variable_ops", "_variable_handle_from_shape_and_dtype")
CompositeTensorGradient = _private("framework.composite_tensor_gradient", "CompositeTensorGradient")

# Functions of a SavedModel.
save_context = _private("saved_model.save_context", "_save_context")
_saving = _private("saved_model.save_context", "save_context")
saved_models = _private("saved_model", "save")
_private("saved_model.save", "save")
LoadedFunction = _private("saved_model.load", "_WrapperFunction")

# Checkpoints: the callbacks after a write, and the file that lists the checkpoints of a folder.
run_write_callbacks = _private("checkpoint.checkpoint", "_execute_callbacks")
_checkpoint_management = _private("checkpoint.checkpoint", "checkpoint_management")
_private("checkpoint.checkpoint_management", "update_checkpoint_state_internal")

# The connection of a coordinator to its cluster.
_eager_runtime = _private("eager.remote", "pywrap_tfe")
_private("pywrap_tfe", "TF_PickUnusedPortOrDie")

# The global seed that TensorFlow uses for an operation with its own seed if no global seed is set.
NO_SEED = _private("framework.random_seed", "DEFAULT_GRAPH_SEED")

# The output of the profiler.
XSpace = _private("profiler.protobuf.xplane_pb2", "XSpace", package="tensorflow.tsl")

# Runtime.
context = _private("eager.context", "context")
_FunctionCallOptions = _private("eager.context", "FunctionCallOptions")
_device_names = _private("eager.context", "_device_parsing_cache")
ServerDef = _private("distribute.collective_all_reduce_strategy", "tensorflow_server_pb2.ServerDef")
CoordinatedJob = _private("eager.context", "coordination_config_pb2.CoordinatedJob")

TENSORFLOW.refuse_misfits(tf.__version__, _misfits)

# The dtypes of NCCL's operation.
NCCL_DTYPES = frozenset(
    tf.as_dtype(dtype)
    for attr in operation_definition("NcclAllReduce").attr
    if attr.name == "T"
    for dtype in attr.allowed_values.list.type
)

# Whether this process is traced: a function, and a variable in TensorFlow 2.19.
_trace_module = inspect.getmodule(tf.profiler.experimental.Trace)
is_traced: Callable[[], bool] = _traced if callable(_traced) else functools.partial(getattr, _trace_module, "enabled")


def runtime_has_started() -> bool:
    """Returns whether TensorFlow has opened its devices. After that it refuses most settings."""
    return context()._context_handle is not None


def configure_collectives(leader: str, device_filters: tuple[str, ...]) -> None:
    """Configures the collectives of the runtime, which reads these settings only when its server starts.

    Unlike `configure_collective_ops`, it does not refuse a runtime that has started.

    Args:
        leader: The task that assigns the keys of groups.
        device_filters: The other tasks that this one communicates with.
    """
    runtime = context()
    runtime._collective_leader = leader
    runtime._collective_scoped_allocator_enabled_ops = ("CollectiveReduce",)
    runtime._collective_device_filters = device_filters


def parts_of_dataset(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a data set and all data sets that it reads from."""
    waiting = [dataset]
    while waiting:
        current = waiting.pop()
        yield current
        waiting.extend(current._inputs())


def caches_in_file(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set caches its elements in a file."""
    return any(tf.get_static_value(part._filename) for part in parts_of_dataset(dataset) if hasattr(part, "_filename"))


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Lists the pair of seeds of each `shuffle`. `(0, 0)` means that it has no seed, and differs on every rank."""
    return [(int(part._seed), int(part._seed2)) for part in parts_of_dataset(dataset) if hasattr(part, "_seed2")]


def unordered_operations(dataset: tf.data.Dataset) -> list[str]:
    """Lists the operations of a data set that were made with `deterministic=False`."""
    found = [part for part in parts_of_dataset(dataset) if getattr(part, "_deterministic", None) == "false"]
    return [type(part).__name__.strip("_") for part in found]


def asks_for_xla(function: Any) -> bool:
    """Returns whether a `tf.function` was made with `jit_compile=True`."""
    return bool(getattr(function, "_jit_compile", None))


def converted_by_autograph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a user's function by AutoGraph: conditions and loops on tensors become operations of the graph."""
    enabled = autograph_status.ControlStatusCtx(autograph_status.Status.ENABLED)
    return autograph_convert(fn, enabled)


_NoneSpec = type(tf.type_spec_from_value(None))


def is_none(spec: Any) -> bool:
    """Returns whether a specification stands for None in a pipeline."""
    return isinstance(spec, _NoneSpec)


def leaves_traces(dataset: tf.data.Dataset) -> bool:
    """Returns whether an epoch of a data set may depend on how much of the previous one was read.

    A cache keeps the elements of the first epoch, and a function may write to a variable that it captures.
    """
    for part in parts_of_dataset(dataset):
        captured = (tensor for function in part._functions() for tensor in function.function.captured_inputs)
        if isinstance(part, dataset_kinds.Cache) or any(tensor.dtype == tf.resource for tensor in captured):
            return True
    return False


def run_independently(operation: Any) -> None:
    """Makes an operation of a function run even if its results are unused, and wait only for its inputs."""
    manager = getattr(operation, "graph", None) and operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def set_mark(operation: Any, name: str, mark: str) -> None:
    """Gives an operation of a graph an attribute that does not affect its result."""
    operation._set_attr(name, tf.compat.v1.AttrValue(s=mark.encode()))


def set_number(operation: Any, name: str, number: int) -> None:
    """Changes an attribute of an operation that is a number."""
    operation._set_attr(name, tf.compat.v1.AttrValue(i=number))


def called_graphs(operation: Any, attribute: str | None = None) -> list[Any]:
    """Returns the graphs of the functions of an operation: those of branches, of a loop, or of a call.

    Args:
        operation: An operation of a graph.
        attribute: Selects the function of this name, such as the "body" of a loop.
    """
    if operation.type not in _WITH_FUNCTIONS:
        return []
    attributes = operation.node_def.attr
    chosen = attributes.values() if attribute is None else [attributes[attribute]]
    names = [each.name for given in chosen for each in (*([given.func] if given.HasField("func") else []), *given.list.func)]
    functions = map(operation.graph._get_function, names)
    return [function.graph for function in functions if hasattr(function, "graph")]  # Others are TensorFlow's own.


def traced_function(graph: Any) -> Any:
    """Returns the Python function whose operations this thread is adding to a graph; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is trace.__code__ and frame.f_locals.get("func_graph") is graph:
            return _unwrap(frame.f_locals["python_func"])[1]
        frame = frame.f_back
    return None


@contextlib.contextmanager
def in_no_strategy() -> Iterator[None]:
    """Makes this thread see no strategy, whatever scopes are open. A variable with copies acts as when a model is saved."""
    _push_mode(_default_replica_mode())
    try:
        with _saving(tf.saved_model.SaveOptions()):
            yield
    finally:
        _pop_mode()


@contextlib.contextmanager
def without_rewriting() -> Iterator[None]:
    """Runs the functions that this thread calls as they were traced, without Grappler's rewrites."""
    runtime = context()
    before = runtime.function_call_options
    runtime.function_call_options = _not_rewriting(before.executor_type, before.config_proto_serialized)
    try:
        yield
    finally:
        runtime.function_call_options = before


@functools.lru_cache(maxsize=1)
def _not_rewriting(executor: str | None, serialized: bytes) -> Any:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return _FunctionCallOptions(executor, config)


def forget_device_names() -> None:
    """Clears the cache of full device names, after this process has become a task of a cluster."""
    _device_names.clear()


@contextlib.contextmanager
def next_port(port: int) -> Iterator[None]:
    """Makes TensorFlow use this port instead of a free one."""
    pick = _eager_runtime.TF_PickUnusedPortOrDie
    _eager_runtime.TF_PickUnusedPortOrDie = lambda: port
    try:
        yield
    finally:
        _eager_runtime.TF_PickUnusedPortOrDie = pick


@contextlib.contextmanager
def without_checkpoint_state() -> Iterator[None]:
    """Disables writing the file that lists the checkpoints of a folder."""
    update = _checkpoint_management.update_checkpoint_state_internal
    _checkpoint_management.update_checkpoint_state_internal = lambda *args, **kwargs: None
    try:
        yield
    finally:
        _checkpoint_management.update_checkpoint_state_internal = update


def random_state() -> tuple[int | None, object]:
    """Returns TensorFlow's global seed, or None, and the state of the generator that numbers unseeded operations."""
    runtime = context()
    return runtime._seed, runtime._rng.getstate() if runtime._seed is not None else None


@contextlib.contextmanager
def operations_seeded(seed: int | None) -> Iterator[None]:
    """Gives random operations of the body another global seed: eager ones, or those of the graph that is being built.

    Functions that are traced in the body inherit it. Unlike `tf.random.set_seed`, it does not change the generator that numbers
    operations.
    """
    holder, name = (context(), "_seed") if tf.executing_eagerly() else (tf.compat.v1.get_default_graph(), "seed")
    before = getattr(holder, name)
    setattr(holder, name, seed)
    try:
        yield
    finally:
        setattr(holder, name, before)


def set_random_state(seed: int, state: object) -> None:
    """Restores the state of TensorFlow's eager context that `random_state` returned, here or in another process."""
    if context()._seed != seed:
        tf.random.set_seed(seed)
    if state is not None:
        context()._rng.setstate(state)


TENSORFLOW.warn_of_newer(tf.__version__)
