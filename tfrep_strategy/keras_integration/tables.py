"""The table of replacements in Keras: models and their parts, loops, data, optimizers, losses and metrics."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import default_graph_stack
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration import distribution, refusals, whole_files
from tfrep_strategy.keras_integration.dataset_creator import EXPERIMENTAL, make_and_adapt
from tfrep_strategy.keras_integration.finding import (
    driver_in_scope,
    driver_of_model,
    of_callback,
    of_callbacks,
    of_embedding,
    of_loop,
    of_optimizer,
    of_outputs,
    of_predictions,
    of_reader,
    of_variable,
)
from tfrep_strategy.keras_integration.patching import Patch, Topic


def clear_but_keep_scope(clear_session: Any, *args: Any, **kwargs: Any) -> None:
    """Keeps the default graph while a strategy is in scope.

    TensorFlow stores the strategy in scope in that graph. With another graph, later training would run under no
    strategy, on every rank alone, and the scope could not be left.
    """
    graph = default_graph_stack.get_default() if tf.distribute.has_strategy() else None
    clear_session(*args, **kwargs)
    if graph is not None:
        default_graph_stack._global_default_graph = graph


class WarningsOfKeras:
    """The module `warnings` for modules of Keras."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    @staticmethod
    def warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **kwargs: Any) -> None:
        """Acts like `warnings.warn`, as if no function of Keras had been replaced."""
        frame: Any = sys._getframe(1)
        level = 1
        while frame is not None and stacklevel > 0:
            level += 1
            stacklevel -= frame.f_globals.get("__name__", "").partition(".")[0] != "tfrep_strategy"
            frame = frame.f_back
        warnings.warn(message, category, level, source, **kwargs)


def minimize_as_in_keras_2(self: Any, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> Any:
    """Takes the gradient of a loss and applies it, as the optimizers of Keras 2 did.

    Args:
        loss: A scalar tensor, with the `tape` that has recorded it, or a function that returns one.
        var_list: Keras variables, or a function that returns them.
        tape: A `tf.GradientTape`; needed if `loss` is a tensor.

    Raises:
        ConfigurationError: `loss` is a tensor, and there is no tape.
    """
    if not callable(loss):
        if tape is None:
            raise ConfigurationError(
                message("The gradient of a loss that is a tensor needs its tape.", hint="pass its tape=...", loss=loss)
            )
    else:
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            loss = loss()
    variables = list(var_list() if callable(var_list) else var_list)
    with tape:  # Records the scaling as well.
        scaled = self.scale_loss(loss)
    return self.apply(tape.gradient(scaled, variables), variables)


patch: Any = Patch  # The driver's method of the same name is called.


class ModelPatches:
    """One attribute for each attribute of Keras."""

    # fmt: off

    _layers = Topic(
        "Variables and layers",
        "Keras's classes create variables, draw random numbers, normalise and update state in their own methods. A model already"
        " has its layers when it comes into the scope, and no public attribute tells the kind of a variable.",
        driver=driver_in_scope,
    )

    initialize_variable = patch(
        "backend.tensorflow.ops.core:Variable._initialize", "(self, value)",
        why="each replica keeps its own moving statistics; a read returns their mean",
    )
    draw_variable = patch(
        "backend.tensorflow.ops.core:Variable._initialize_with_initializer", "(self, initializer)",
        why="each part of a variable is created on its own server",
    )
    add_to_variable = patch(
        "backend.common.variables:Variable.assign_add", "(self, value)",
        why="adds on the server in one operation; Keras reads, adds and writes", driver=of_variable,
    )
    subtract_from_variable = patch(
        "backend.common.variables:Variable.assign_sub", "(self, value)",
        why="subtracts on the server in one operation", driver=of_variable,
    )
    call_layer = patch(
        "layers.layer:Layer.__call__", "(self, *args, **kwargs)",
        why="computes on the layer's logical device",
    )
    add_weight = patch(
        "layers.layer:Layer.add_weight",
        (
            "(self, *args, shape=None, initializer=None, dtype=None, trainable=True, autocast=True, regularizer=None,"
            " constraint=None, aggregation='none', overwrite_with_gradient=False, name=None)",
            "(self, shape=None, initializer=None, dtype=None, trainable=True, autocast=True, regularizer=None, constraint=None,"
            " aggregation='none', overwrite_with_gradient=False, name=None)",
        ),
        why="marks the state of layers, unlike that of optimizers; places it on the layer's logical device",
    )
    next_seed = patch(
        "random.seed_generator:SeedGenerator.next", "(self, ordered=True)",
        why="replicas, and steps of workers, draw different random numbers",
    )
    normalize = patch(
        "layers.normalization.batch_normalization:BatchNormalization.call", "(self, inputs, training=None, mask=None)",
        why='normalises with the replica\'s own statistics (`batch_statistics="replica"`)',
    )
    moments = patch(
        "layers.normalization.batch_normalization:BatchNormalization._moments", "(self, inputs, mask)",
        why="a part without rows leaves the statistics unchanged; supports a replica's own statistics",
    )
    embed = patch(
        "layers.core.embedding:Embedding.call", "(self, inputs)",
        why="fetches only the rows of the lookup from the servers instead of the whole table", driver=of_embedding,
    )

    _rows = Topic(
        "Parts without rows",
        "A replica's part may have no rows. Operations of the backend then fail or give no gradient, for every caller."
        " Reflecting pads are replaced in TensorFlow itself (`strategies/operations.py`).",
        driver=driver_in_scope,
    )

    conv = patch(
        "backend.tensorflow.ops.nn:conv",
        "(inputs, kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="a part without rows gives a result without rows, and gradients",
    )
    conv_transpose = patch(
        "backend.tensorflow.ops.nn:conv_transpose",
        "(inputs, kernel, strides=1, padding='valid', output_padding=None, data_format=None, dilation_rate=1)",
        why="the same",
    )
    depthwise_conv = patch(
        "backend.tensorflow.ops.nn:depthwise_conv",
        "(inputs, kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="the same",
    )
    separable_conv = patch(
        "backend.tensorflow.ops.nn:separable_conv",
        "(inputs, depthwise_kernel, pointwise_kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="the same",
    )
    max_pool = patch(
        "backend.tensorflow.ops.nn:max_pool", "(inputs, pool_size, strides=None, padding='valid', data_format=None)",
        why="the same",
    )
    ctc_loss = patch(
        "backend.tensorflow.ops.nn:ctc_loss", "(target, output, target_length, output_length, mask_index=0)",
        why="TensorFlow computes no loss for a part without sequences",
    )
    ctc_decode = patch(
        "backend.tensorflow.ops.nn:ctc_decode",
        "(inputs, sequence_lengths, strategy='greedy', beam_width=100, top_paths=1, merge_repeated=True, mask_index=0)",
        why="TensorFlow refuses to decode a part without sequences",
    )
    map_rows = patch(
        "backend.tensorflow.ops.core:map", "(f, xs)",
        why="Keras would inspect the first row",
    )
    transform_images = patch(
        "layers.preprocessing.image_preprocessing.base_image_preprocessing_layer:BaseImagePreprocessingLayer.call",
        "(self, data, training=True)",
        why="some of these layers inspect the first image",
    )
    add = patch(
        "backend.tensorflow.ops.numpy:add", "(x1, x2)",
        why="Keras would treat a part with one row as a bias",
    )

    _files = Topic(
        "Callbacks and files",
        "Every process runs the user's program, but only one may write. Keras's callbacks and functions do the writing."
        " Work for a list of callbacks as a whole is done by public callbacks at its ends.",
        driver=driver_in_scope,
    )

    init_callbacks = patch(
        "callbacks.callback_list:CallbackList.__init__",
        "(self, callbacks=None, add_history=False, add_progbar=False, model=None, **params)",
        why="leaves out callbacks that write on another process; adds those that keep processes in step", driver=of_callbacks,
    )
    save_checkpoint = patch(
        "callbacks.model_checkpoint:ModelCheckpoint._save_model", "(self, epoch, batch, logs)",
        why="all processes decide alike; only the writing process looks at the file system", driver=of_callback,
    )
    save_orbax = patch(
        "callbacks.orbax_checkpoint:OrbaxCheckpoint._save_checkpoint", "(self, step, logs=None)", optional=True,
        why="writes once; Orbax knows only JAX's processes, so each rank would write every file", driver=of_callback,
    )
    wait_for_orbax = patch(
        "callbacks.orbax_checkpoint:OrbaxCheckpoint.wait_until_finished", "(self)", optional=True,
        why="returns on every process when the files are complete", driver=of_callback,
    )
    save_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore._save_model", "(self)",
        why="writes a backup once; it replaces the previous one when it is complete", driver=of_callback,
    )
    restore_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore.on_train_begin", "(self, logs=None)",
        why="restores the newest complete backup that the chief finds, on every process", driver=of_callback,
    )
    remove_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore.on_train_end", "(self, logs=None)",
        why="only the process that wrote the backup removes it", driver=of_callback,
    )
    save_model = patch(
        "saving.saving_api:save_model", "(model, filepath, overwrite=True, zipped=None, **kwargs)", everywhere=True,
        why="one process writes the path; it gets its name when it is complete", driver=driver_of_model,
    )
    save_weights = patch(
        "saving.saving_api:save_weights", "(model, filepath, overwrite=True, max_shard_size=None, **kwargs)", everywhere=True,
        why="the same", driver=driver_of_model,
    )
    export = patch(
        "models.model:Model.export",
        "(self, filepath, format='tf_saved_model', verbose=None, input_signature=None, **kwargs)",
        why="the same", driver=driver_of_model,
    )
    open_hdf5 = patch(
        "saving.saving_lib:H5IOStore._get_h5_file", "(self, path_or_io, mode=None)",
        why="a full disk raises an error; HDF5 would end Python", does=whole_files.open_of_store,
    )
    get_file = patch(
        "utils.file_utils:get_file",
        "(fname=None, origin=None, untar=False, md5_hash=None, file_hash=None, cache_subdir='datasets', hash_algorithm='auto',"
        " extract=False, archive_format='auto', cache_dir=None, force_download=False)",
        why="one process of a machine fetches a destination at a time", everywhere=True,
        does=whole_files.get_file_once,
    )
    urlretrieve = patch(
        "utils.file_utils:urlretrieve", "(url, filename=None, reporthook=None, data=None)",
        why="a file gets its name when it is complete; rank 0 shows the progress bar", does=whole_files.download_whole,
    )

    _process = Topic(
        "Process", "These functions of modules change state of the whole process.", driver=driver_in_scope
    )

    clear_session = patch(
        "backend.common.global_state:clear_session", "(free_memory=True)", everywhere=True,
        why="the scope survives the call", does=clear_but_keep_scope,
    )
    distribution_backend = patch(
        "distribution.distribution_lib:distribution_lib", instead=distribution,
        why="Keras's prototype for TensorFlow distributes nothing",
    )
    set_distribution = patch(
        "distribution.distribution_lib:set_distribution", "(value)", everywhere=True,
        why="the devices of the mesh become the replicas of a strategy in scope", does=distribution.enter,
    )
    warnings = patch(
        "warnings", everywhere=True, instead=WarningsOfKeras(),
        why="a warning names the same line as with plain Keras; frames of this package do not count",
    )

    # fmt: on


class TrainingPatches:
    """One attribute for each attribute of Keras."""

    # fmt: off

    _loops = Topic(
        "Loops",
        "The user's code defines and creates the model. Its base class belongs to Keras, and users override the public hooks"
        " (`train_step`, `make_train_function`). `fit` creates its data iterator itself.",
        driver=driver_of_model,
    )

    compile = patch(
        "trainers.trainer:BaseTrainer.compile",
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, weighted_metrics=None, run_eagerly=False,"
        " steps_per_execution=1, jit_compile='auto', auto_scale_loss=True)",
        why="creates optimizers and metrics given by name in the scope; refuses those created outside",
    )
    resolve_auto_jit_compile = patch(
        "trainers.trainer:BaseTrainer._resolve_auto_jit_compile", "(self)",
        why="compiles with XLA if one device would",
    )
    fit = patch(
        "backend.tensorflow.trainer:Trainer.fit",
        "(self, x=None, y=None, batch_size=None, epochs=1, verbose='auto', callbacks=None, validation_split=0.0,"
        " validation_data=None, shuffle=True, class_weight=None, sample_weight=None, initial_epoch=0, steps_per_epoch=None,"
        " validation_steps=None, validation_batch_size=None, validation_freq=1)",
        why="refuses models created outside the scope; compares validation data before training; drives workers",
        does=refusals.train,
    )
    evaluate = patch(
        "backend.tensorflow.trainer:Trainer.evaluate",
        "(self, x=None, y=None, batch_size=None, verbose='auto', sample_weight=None, steps=None, callbacks=None,"
        " return_dict=False, **kwargs)",
        why="merges state first; drives workers", does=refusals.evaluate,
    )
    metrics_result_or_logs = patch(
        "trainers.trainer:BaseTrainer._get_metrics_result_or_logs", "(self, logs)",
        why="sums the state of all metrics over the processes in one collective",
    )
    predict = patch(
        "backend.tensorflow.trainer:Trainer.predict",
        "(self, x, batch_size=None, verbose='auto', steps=None, callbacks=None)",
        why="merges state first; drives workers",
    )
    train_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.train_on_batch",
        "(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False)",
        why="compares the arguments of the first call across ranks; a worker computes the step", does=refusals.train,
    )
    test_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.test_on_batch",
        "(self, x, y=None, sample_weight=None, return_dict=False)",
        why="the same, and merges state first", does=refusals.evaluate,
    )
    predict_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.predict_on_batch", "(self, x)",
        why="the same",
    )
    make_epoch_iterator = patch(
        "backend.tensorflow.trainer:TFEpochIterator", "(distribute_strategy=None, *args, **kwargs)",
        why="a subclass yields `Shards`, equally many on all processes, or batches for workers", driver=of_loop,
    )
    build_model = patch(
        "backend.tensorflow.trainer:Trainer._maybe_symbolic_build", "(self, iterator=None, data_batch=None)",
        why="builds from the specification of the data; a batch read for that would be lost",
    )
    make_function = patch(
        "backend.tensorflow.trainer:Trainer._make_function", "(self, step_function)",
        why="takes whole batches (`train_on_batch`) and returns global logs; runs steps on workers",
    )
    make_predict_function = patch(
        "backend.tensorflow.trainer:Trainer.make_predict_function", "(self, force=False)",
        why="takes whole batches (`predict_on_batch`); computes predictions on workers",
    )
    reduce_per_replica = patch(
        "backend.tensorflow.trainer:reduce_per_replica", "(values, strategy, reduction)",
        why="returns the predictions of all replicas, in order, on every process", driver=of_outputs,
    )
    join_predictions = patch(
        "backend.tensorflow.trainer:potentially_ragged_concat", "(tensors)",
        why="waits for the predictions of workers", driver=of_predictions,
    )

    _data = Topic(
        "Data", "Keras chooses the data adapter by a chain of type checks that cannot be extended.", driver=of_reader
    )

    get_data_adapter = patch(
        "trainers.data_adapters:get_data_adapter",
        "(x, y=None, sample_weight=None, batch_size=None, steps_per_epoch=None, shuffle=False, class_weight=None)",
        why="accepts a `DatasetCreator`, and datasets that the user has distributed", does=make_and_adapt,
    )
    experimental = patch(
        "keras.utils:experimental",
        why="provides `DatasetCreator` under its Keras 2 name, for older scripts", adds=EXPERIMENTAL,
    )

    _optimizers = Topic(
        "Optimizers",
        "`apply` is public, and the user chooses the class of the optimizer, or wraps one. Keras's TensorFlow optimizer sums"
        " gradients over replicas only after clipping them.",
        driver=driver_in_scope,
    )

    build_optimizer = patch(
        "optimizers.base_optimizer:BaseOptimizer.build", "(self, variables)",
        why="refuses variables created outside the scope; places slots on servers", driver=of_optimizer,
    )
    build_loss_scaling = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.build", "(self, var_list)",
        why="records that the inner optimizer gets global gradients", driver=of_optimizer,
    )
    apply = patch(
        "optimizers.base_optimizer:BaseOptimizer.apply", "(self, grads, trainable_variables=None)",
        why="aggregates gradients first; gradients of several workers make one update (`sync=True`)", does=refusals.apply,
    )
    apply_scaled = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer._tf_apply", "(self, grads, trainable_variables=None)",
        why="all replicas skip a step if one overflows; also works outside replicas",
    )
    check_finite = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite", "(self, grads)",
        why="an overflow in one part counts for the whole gradient",
    )
    apply_to_variables = patch(
        "optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients", "(self, grads, trainable_variables)",
        why="records the variables of the clipped gradients, for `gradient_transformers`",
    )
    clip_gradients = patch(
        "optimizers.base_optimizer:BaseOptimizer._clip_gradients", "(self, grads)",
        why="makes accumulated gradients global and transforms them before the update uses them",
    )
    add_slot = patch(
        "backend.tensorflow.optimizer:TFOptimizer.add_variable_from_reference",
        "(self, reference_variable, name=None, initializer='zeros')",
        why="accumulators hold a partial sum on each process; sharded slots hold a shard",
    )
    update_variables = patch(
        "backend.tensorflow.optimizer:TFOptimizer._backend_update_step", "(self, grads, trainable_variables, learning_rate)",
        why="global gradients are not summed again; each replica updates its shard if the state is sharded",
    )
    accumulate_gradients = patch(
        "backend.tensorflow.optimizer:TFOptimizer._backend_increment_gradient_accumulators", "(self, grads, acc_grads)",
        why="each replica adds to its own partial sum; workers add on the server",
    )
    variable_key = patch(
        "backend.tensorflow.optimizer:TFOptimizer._var_key", "(self, variable)",
        why="a part of a variable has the key of the whole variable", driver=of_optimizer,
    )
    update_where_it_is = patch(
        "backend.tensorflow.optimizer:TFOptimizer._distributed_tf_update_step",
        "(self, distribution, grads_and_vars, learning_rate)",
        why="updates each part of a variable on its server", driver=of_optimizer,
    )
    update_ftrl = patch(
        "optimizers.ftrl:Ftrl.update_step", "(self, gradient, variable, learning_rate)",
        why="updates on the server in one operation; interleaved updates would corrupt its sums", driver=of_optimizer,
    )
    minimize = patch(
        "optimizers.base_optimizer:BaseOptimizer.minimize",
        why="provides the method of Keras 2, for older scripts", adds=minimize_as_in_keras_2,
    )

    _reductions = Topic(
        "Losses and metrics",
        "The contribution of a replica's part to the global batch depends on how a loss or a metric reduces it. Functions of"
        " modules do the reduction, and base classes of users' classes.",
        driver=driver_in_scope,
    )

    compute_loss = patch(
        "losses.loss:Loss.__call__", "(self, y_true, y_pred, sample_weight=None)",
        why="in a custom training loop, a loss that mixes examples (Dice, Tversky, Circle) sees those of all replicas",
    )
    add_loss = patch(
        "layers.layer:Layer.add_loss", "(self, loss)",
        why="each replica keeps its own losses",
    )
    scale_for_replicas = patch(
        "losses.loss:scale_loss_for_distribution", "(value)",
        why="leaves losses unscaled in a step that weights gradients by examples",
    )
    unscale_for_replicas = patch(
        "losses.loss:unscale_loss_for_distribution", "(value)",
        why="leaves losses that were not scaled unchanged",
    )
    reduce_loss = patch(
        "losses.loss:reduce_values", "(values, sample_weight=None, reduction='sum_over_batch_size')",
        why="divides by the total over all replicas",
    )
    apply_mask = patch(
        "losses.loss:apply_mask", "(sample_weight, mask, dtype, reduction)",
        why="an unmasked entry has its weight in the global batch",
    )
    update_mean = patch(
        "metrics.reduction_metrics:Mean.update_state", "(self, values, sample_weight=None)",
        why="weights a scalar by the replica's share of examples; without examples it does not count",
    )
    metric_result = patch(
        "metrics.metric:Metric.result", "(self)", in_subclasses=True,
        why="identifies the results of metrics among the logs of a worker's step",
    )
    update_metric = patch(
        "metrics.metric:Metric.update_state", "(self, *args, **kwargs)", in_subclasses=True,
        why="adds a worker's counts on the server in one operation",
    )
    make_metric = patch(
        "metrics.metric:Metric.__init__", "(self, dtype=None, name=None)",
        why="makes updates of metrics on servers exact",
    )

    # fmt: on
