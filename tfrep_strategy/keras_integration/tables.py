"""The table of replacements in Keras: models and their parts, loops, data, optimizers, losses and metrics."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import tensorflow as tf

from tfrep_strategy.core.tf import default_graph_stack
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.keras_integration import refusals, whole_files
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
                message("A loss that is a tensor has no gradient of itself.", hint="pass its tape=...", loss=loss)
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
        "Layers make variables, and draw, normalise and remember, in methods of Keras's classes. A model has them already when it"
        " comes into the scope; nothing that is public tells of which kind a variable is.",
        driver=driver_in_scope,
    )

    initialize_variable = patch(
        "backend.tensorflow.ops.core:Variable._initialize", "(self, value)",
        why="replicas keep moving statistics of their own, until somebody reads their mean",
    )
    draw_variable = patch(
        "backend.tensorflow.ops.core:Variable._initialize_with_initializer", "(self, initializer)",
        why="each part of a variable is made where it is",
    )
    add_to_variable = patch(
        "backend.common.variables:Variable.assign_add", "(self, value)",
        why="one operation on the server: Keras reads, adds and writes", driver=of_variable,
    )
    subtract_from_variable = patch(
        "backend.common.variables:Variable.assign_sub", "(self, value)",
        why="one operation on the server", driver=of_variable,
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
        why="tells the state of a layer from that of an optimizer; puts it on the layer's logical device",
    )
    next_seed = patch(
        "random.seed_generator:SeedGenerator.next", "(self, ordered=True)",
        why="replicas, and steps of workers, draw different numbers",
    )
    normalize = patch(
        "layers.normalization.batch_normalization:BatchNormalization.call", "(self, inputs, training=None, mask=None)",
        why='a replica has statistics of its own (`batch_statistics="replica"`)',
    )
    moments = patch(
        "layers.normalization.batch_normalization:BatchNormalization._moments", "(self, inputs, mask)",
        why="no rows change no statistics; a replica has statistics of its own",
    )
    embed = patch(
        "layers.core.embedding:Embedding.call", "(self, inputs)",
        why="fetches the rows that are looked up from the servers, and not the table", driver=of_embedding,
    )

    _rows = Topic(
        "Parts of no rows",
        "A replica's part may have no rows. Operations of the backend then fail, or give no gradient, whoever calls them."
        " Pads that reflect are replaced in TensorFlow itself (`strategies/operations.py`).",
        driver=driver_in_scope,
    )

    conv = patch(
        "backend.tensorflow.ops.nn:conv",
        "(inputs, kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="no rows have a result of no rows, and gradients",
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
        why="TensorFlow has no loss of no sequences",
    )
    ctc_decode = patch(
        "backend.tensorflow.ops.nn:ctc_decode",
        "(inputs, sequence_lengths, strategy='greedy', beam_width=100, top_paths=1, merge_repeated=True, mask_index=0)",
        why="TensorFlow refuses to decode no sequences",
    )
    map_rows = patch(
        "backend.tensorflow.ops.core:map", "(f, xs)",
        why="Keras would take the first row",
    )
    transform_images = patch(
        "layers.preprocessing.image_preprocessing.base_image_preprocessing_layer:BaseImagePreprocessingLayer.call",
        "(self, data, training=True)",
        why="some of these layers look at the first image",
    )
    add = patch(
        "backend.tensorflow.ops.numpy:add", "(x1, x2)",
        why="Keras would add a part of one row as a bias",
    )

    _files = Topic(
        "Callbacks and files",
        "Every process runs the user's program, and one may write. What writes is Keras's: the callbacks that users give, and the"
        " functions that they call. What a list of callbacks does together is done by callbacks at its ends, which are public.",
        driver=driver_in_scope,
    )

    init_callbacks = patch(
        "callbacks.callback_list:CallbackList.__init__",
        "(self, callbacks=None, add_history=False, add_progbar=False, model=None, **params)",
        why="leaves out what another process writes; adds what keeps the processes in step", driver=of_callbacks,
    )
    save_checkpoint = patch(
        "callbacks.model_checkpoint:ModelCheckpoint._save_model", "(self, epoch, batch, logs)",
        why="all decide alike, and who does not write does not look at the file system", driver=of_callback,
    )
    save_orbax = patch(
        "callbacks.orbax_checkpoint:OrbaxCheckpoint._save_checkpoint", "(self, step, logs=None)", optional=True,
        why="is written once: Orbax knows JAX's processes and not these, so that each would write every file", driver=of_callback,
    )
    wait_for_orbax = patch(
        "callbacks.orbax_checkpoint:OrbaxCheckpoint.wait_until_finished", "(self)", optional=True,
        why="returns everywhere when the files are there", driver=of_callback,
    )
    save_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore._save_model", "(self)",
        why="is written once, and replaces the one before when it is complete", driver=of_callback,
    )
    restore_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore.on_train_begin", "(self, logs=None)",
        why="is restored everywhere, from the newest whole one that the chief finds", driver=of_callback,
    )
    remove_backup = patch(
        "callbacks.backup_and_restore:BackupAndRestore.on_train_end", "(self, logs=None)",
        why="is removed where it was written", driver=of_callback,
    )
    save_model = patch(
        "saving.saving_api:save_model", "(model, filepath, overwrite=True, zipped=None, **kwargs)", everywhere=True,
        why="a path is written by one process, and has its name when it is complete", driver=driver_of_model,
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
        why="a full disk is an error; HDF5 would end Python", does=whole_files.open_of_store,
    )
    get_file = patch(
        "utils.file_utils:get_file",
        "(fname=None, origin=None, untar=False, md5_hash=None, file_hash=None, cache_subdir='datasets', hash_algorithm='auto',"
        " extract=False, archive_format='auto', cache_dir=None, force_download=False)",
        why="a destination is fetched by one process of a machine at a time", everywhere=True,
        does=whole_files.get_file_once,
    )
    urlretrieve = patch(
        "utils.file_utils:urlretrieve", "(url, filename=None, reporthook=None, data=None)",
        why="a file has its name when it is complete; rank 0 draws the bar", does=whole_files.download_whole,
    )

    _process = Topic(
        "Process", "These are functions of modules, and what they change belongs to the whole process.", driver=driver_in_scope
    )

    clear_session = patch(
        "backend.common.global_state:clear_session", "(free_memory=True)", everywhere=True,
        why="the scope outlives it", does=clear_but_keep_scope,
    )
    warnings = patch(
        "warnings", everywhere=True, instead=WarningsOfKeras(),
        why="a warning blames the line that plain Keras blames: frames of this package do not count",
    )

    # fmt: on


class TrainingPatches:
    """One attribute for each attribute of Keras."""

    # fmt: off

    _loops = Topic(
        "Loops",
        "A model is the user's class, made by the user's code: its base class is Keras's, and the public hooks (`train_step`,"
        " `make_train_function`) are the user's to override. `fit` makes its iterator of data itself.",
        driver=driver_of_model,
    )

    compile = patch(
        "trainers.trainer:BaseTrainer.compile",
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, weighted_metrics=None, run_eagerly=False,"
        " steps_per_execution=1, jit_compile='auto', auto_scale_loss=True)",
        why="makes in the scope what is named; refuses optimizers and metrics that were made outside",
    )
    resolve_auto_jit_compile = patch(
        "trainers.trainer:BaseTrainer._resolve_auto_jit_compile", "(self)",
        why="XLA is on where one device has it on",
    )
    fit = patch(
        "backend.tensorflow.trainer:Trainer.fit",
        "(self, x=None, y=None, batch_size=None, epochs=1, verbose='auto', callbacks=None, validation_split=0.0,"
        " validation_data=None, shuffle=True, class_weight=None, sample_weight=None, initial_epoch=0, steps_per_epoch=None,"
        " validation_steps=None, validation_batch_size=None, validation_freq=1)",
        why="refuses models that were made outside the scope; compares validation data before training; drives workers",
        does=refusals.train,
    )
    evaluate = patch(
        "backend.tensorflow.trainer:Trainer.evaluate",
        "(self, x=None, y=None, batch_size=None, verbose='auto', sample_weight=None, steps=None, callbacks=None,"
        " return_dict=False, **kwargs)",
        why="state is merged first; workers are driven", does=refusals.evaluate,
    )
    metrics_result_or_logs = patch(
        "trainers.trainer:BaseTrainer._get_metrics_result_or_logs", "(self, logs)",
        why="the state of all metrics is summed over the processes at once",
    )
    predict = patch(
        "backend.tensorflow.trainer:Trainer.predict",
        "(self, x, batch_size=None, verbose='auto', steps=None, callbacks=None)",
        why="state is merged first; workers are driven",
    )
    train_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.train_on_batch",
        "(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False)",
        why="what the first call gets is compared; a worker does the step", does=refusals.train,
    )
    test_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.test_on_batch",
        "(self, x, y=None, sample_weight=None, return_dict=False)",
        why="the same, and state is merged first", does=refusals.evaluate,
    )
    predict_on_batch = patch(
        "backend.tensorflow.trainer:Trainer.predict_on_batch", "(self, x)",
        why="the same",
    )
    make_epoch_iterator = patch(
        "backend.tensorflow.trainer:TFEpochIterator", "(distribute_strategy=None, *args, **kwargs)",
        why="a subclass hands out `Shards`, as many as all processes have, or batches for workers", driver=of_loop,
    )
    build_model = patch(
        "backend.tensorflow.trainer:Trainer._maybe_symbolic_build", "(self, iterator=None, data_batch=None)",
        why="builds from the specification of the data: a batch that is read for that would be lost",
    )
    make_function = patch(
        "backend.tensorflow.trainer:Trainer._make_function", "(self, step_function)",
        why="whole batches (`train_on_batch`), global logs; steps that workers do",
    )
    make_predict_function = patch(
        "backend.tensorflow.trainer:Trainer.make_predict_function", "(self, force=False)",
        why="whole batches (`predict_on_batch`); predictions that workers make",
    )
    reduce_per_replica = patch(
        "backend.tensorflow.trainer:reduce_per_replica", "(values, strategy, reduction)",
        why="predictions of all replicas, in order, on every process", driver=of_outputs,
    )
    join_predictions = patch(
        "backend.tensorflow.trainer:potentially_ragged_concat", "(tensors)",
        why="waits for the predictions of workers", driver=of_predictions,
    )

    _data = Topic(
        "Data", "Keras chooses the adapter of data by a chain of type checks, which cannot be added to.", driver=of_reader
    )

    get_data_adapter = patch(
        "trainers.data_adapters:get_data_adapter",
        "(x, y=None, sample_weight=None, batch_size=None, steps_per_epoch=None, shuffle=False, class_weight=None)",
        why="takes a `DatasetCreator`, and data sets that the user has distributed", does=make_and_adapt,
    )
    experimental = patch(
        "keras.utils:experimental",
        why="`DatasetCreator` is where it was in Keras 2, so that scripts written for it run", adds=EXPERIMENTAL,
    )

    _optimizers = Topic(
        "Optimizers",
        "`apply` is public, and an optimizer is of the class that the user has named, or wraps one. Keras's TensorFlow optimizer"
        " sums gradients over replicas after it has clipped them.",
        driver=driver_in_scope,
    )

    build_optimizer = patch(
        "optimizers.base_optimizer:BaseOptimizer.build", "(self, variables)",
        why="refuses what was made outside the scope, or takes it over (servers)", driver=of_optimizer,
    )
    build_loss_scaling = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.build", "(self, var_list)",
        why="notes that the optimizer inside gets gradients which are global already", driver=of_optimizer,
    )
    apply = patch(
        "optimizers.base_optimizer:BaseOptimizer.apply", "(self, grads, trainable_variables=None)",
        why="aggregate first; gradients of several workers make one update (`sync=True`)", does=refusals.apply,
    )
    apply_scaled = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer._tf_apply", "(self, grads, trainable_variables=None)",
        why="an overflow on one replica is one of the global gradient, which all skip; goes on outside replicas too",
    )
    check_finite = patch(
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite", "(self, grads)",
        why="an overflow in a part is one of the whole gradient",
    )
    apply_to_variables = patch(
        "optimizers.base_optimizer:BaseOptimizer._backend_apply_gradients", "(self, grads, trainable_variables)",
        why="notes whose gradients an update clips, for `gradient_transformers`",
    )
    clip_gradients = patch(
        "optimizers.base_optimizer:BaseOptimizer._clip_gradients", "(self, grads)",
        why="accumulated gradients become global, and are transformed, before an update looks at them",
    )
    add_slot = patch(
        "backend.tensorflow.optimizer:TFOptimizer.add_variable_from_reference",
        "(self, reference_variable, name=None, initializer='zeros')",
        why="accumulators of gradients hold a part of the sum on each process, sharded slots a part of the whole",
    )
    update_variables = patch(
        "backend.tensorflow.optimizer:TFOptimizer._backend_update_step", "(self, grads, trainable_variables, learning_rate)",
        why="global gradients need no summing; a replica updates its part if the state is sharded",
    )
    accumulate_gradients = patch(
        "backend.tensorflow.optimizer:TFOptimizer._backend_increment_gradient_accumulators", "(self, grads, acc_grads)",
        why="each replica adds to its own part; workers add on the server",
    )
    variable_key = patch(
        "backend.tensorflow.optimizer:TFOptimizer._var_key", "(self, variable)",
        why="knows a part of a variable by the whole", driver=of_optimizer,
    )
    update_where_it_is = patch(
        "backend.tensorflow.optimizer:TFOptimizer._distributed_tf_update_step",
        "(self, distribution, grads_and_vars, learning_rate)",
        why="each part of a variable is updated on its server", driver=of_optimizer,
    )
    update_ftrl = patch(
        "optimizers.ftrl:Ftrl.update_step", "(self, gradient, variable, learning_rate)",
        why="one operation on the server: two workers that interleave would spoil its sums for good", driver=of_optimizer,
    )
    minimize = patch(
        "optimizers.base_optimizer:BaseOptimizer.minimize",
        why="scripts that were written for Keras 2 call it", adds=minimize_as_in_keras_2,
    )

    _reductions = Topic(
        "Losses and metrics",
        "What a replica's part of a batch says of the whole depends on how a loss or a metric reduces it. The reducing"
        " is in functions of modules, and in classes that users derive from.",
        driver=driver_in_scope,
    )

    compute_loss = patch(
        "losses.loss:Loss.__call__", "(self, y_true, y_pred, sample_weight=None)",
        why="in a loop written for replicas, a loss that mixes rows (Dice, Tversky, Circle) sees those of all",
    )
    add_loss = patch(
        "layers.layer:Layer.add_loss", "(self, loss)",
        why="each replica has losses of its own",
    )
    scale_for_replicas = patch(
        "losses.loss:scale_loss_for_distribution", "(value)",
        why="a step that weights gradients by examples does not weigh losses",
    )
    unscale_for_replicas = patch(
        "losses.loss:unscale_loss_for_distribution", "(value)",
        why="nothing is undone where nothing was scaled",
    )
    reduce_loss = patch(
        "losses.loss:reduce_values", "(values, sample_weight=None, reduction='sum_over_batch_size')",
        why="divides by what all replicas have together",
    )
    apply_mask = patch(
        "losses.loss:apply_mask", "(sample_weight, mask, dtype, reduction)",
        why="an unmasked entry weighs what it weighs in the global batch",
    )
    update_mean = patch(
        "metrics.reduction_metrics:Mean.update_state", "(self, values, sample_weight=None)",
        why="a scalar counts with the replica's share, and not at all without examples",
    )
    metric_result = patch(
        "metrics.metric:Metric.result", "(self)", in_subclasses=True,
        why="tells which logs of a worker's step are results of metrics",
    )
    update_metric = patch(
        "metrics.metric:Metric.update_state", "(self, *args, **kwargs)", in_subclasses=True,
        why="what a worker counts is added on the server at once",
    )
    make_metric = patch(
        "metrics.metric:Metric.__init__", "(self, dtype=None, name=None)",
        why="finds the metrics whose state is on servers",
    )

    # fmt: on
