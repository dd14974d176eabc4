"""What of Keras's training is replaced: loops, data, optimizers, losses and metrics."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.keras_integration.dataset_creator import EXPERIMENTAL, make_and_adapt
from tfrep_strategy.keras_integration.finding import (
    driver_in_scope,
    driver_of_model,
    of_loop,
    of_optimizer,
    of_outputs,
    of_predictions,
    of_reader,
)
from tfrep_strategy.keras_integration.patching import Patch, Topic
from tfrep_strategy.keras_integration.shared import forgotten_scope, minimize

patch: Any = Patch  # What a driver does is a method of the same name.


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
        "trainers.trainer:Trainer.compile",
        "(self, optimizer='rmsprop', loss=None, loss_weights=None, metrics=None, weighted_metrics=None, run_eagerly=False,"
        " steps_per_execution=1, jit_compile='auto', auto_scale_loss=True)",
        why="makes in the scope what is named; refuses optimizers and metrics that were made outside",
    )
    resolve_auto_jit_compile = patch(
        "trainers.trainer:Trainer._resolve_auto_jit_compile", "(self)",
        why="XLA is on where one device has it on",
    )
    fit = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.fit",
        "(self, x=None, y=None, batch_size=None, epochs=1, verbose='auto', callbacks=None, validation_split=0.0,"
        " validation_data=None, shuffle=True, class_weight=None, sample_weight=None, initial_epoch=0, steps_per_epoch=None,"
        " validation_steps=None, validation_batch_size=None, validation_freq=1)",
        why="refuses models that were made outside the scope; compares validation data before training; drives workers",
        does=forgotten_scope.train,
    )
    evaluate = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.evaluate",
        "(self, x=None, y=None, batch_size=None, verbose='auto', sample_weight=None, steps=None, callbacks=None,"
        " return_dict=False, **kwargs)",
        why="state is merged first; workers are driven", does=forgotten_scope.evaluate,
    )
    metrics_result_or_logs = patch(
        "trainers.trainer:Trainer._get_metrics_result_or_logs", "(self, logs)",
        why="the state of all metrics is summed over the processes at once",
    )
    predict = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.predict",
        "(self, x, batch_size=None, verbose='auto', steps=None, callbacks=None)",
        why="state is merged first; workers are driven",
    )
    train_on_batch = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.train_on_batch",
        "(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False)",
        why="what the first call gets is compared; a worker does the step", does=forgotten_scope.train,
    )
    test_on_batch = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.test_on_batch",
        "(self, x, y=None, sample_weight=None, return_dict=False)",
        why="the same, and state is merged first", does=forgotten_scope.evaluate,
    )
    predict_on_batch = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.predict_on_batch", "(self, x)",
        why="the same",
    )
    make_epoch_iterator = patch(
        "backend.tensorflow.trainer:TFEpochIterator", "(distribute_strategy=None, *args, **kwargs)",
        why="a subclass hands out `Shards`, as many as all processes have, or batches for workers", driver=of_loop,
    )
    build_model = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build", "(self, iterator=None, data_batch=None)",
        why="builds from the specification of the data: a batch that is read for that would be lost",
    )
    make_function = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer._make_function", "(self, step_function)",
        why="whole batches (`train_on_batch`), global logs; steps that workers do",
    )
    make_predict_function = patch(
        "backend.tensorflow.trainer:TensorFlowTrainer.make_predict_function", "(self, force=False)",
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
        why="aggregate first; gradients of several workers make one update (`sync=True`)", does=forgotten_scope.apply,
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
        why="scripts that were written for Keras 2 call it", adds=minimize.minimize,
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
        why="a step that weighs gradients by examples does not weigh losses",
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
