"""What of Keras's models is replaced, and of what they are made with: variables, layers, callbacks, files."""

from __future__ import annotations

from typing import Any

from tfrep_strategy.keras_integration.finding import (
    driver_in_scope,
    driver_of_model,
    of_callback,
    of_callbacks,
    of_embedding,
    of_variable,
)
from tfrep_strategy.keras_integration.patching import Patch, Topic
from tfrep_strategy.keras_integration.shared import files, hdf5_files, session, warnings_of_keras

patch: Any = Patch  # What a driver does is a method of the same name.


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
        "backend.tensorflow.core:Variable._initialize", "(self, value)",
        why="replicas keep moving statistics of their own, until somebody reads their mean",
    )
    draw_variable = patch(
        "backend.tensorflow.core:Variable._initialize_with_initializer", "(self, initializer)",
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
        " Pads that reflect are replaced in TensorFlow itself (`strategies/reflecting_pads.py`).",
        driver=driver_in_scope,
    )

    conv = patch(
        "backend.tensorflow.nn:conv",
        "(inputs, kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="no rows have a result of no rows, and gradients",
    )
    conv_transpose = patch(
        "backend.tensorflow.nn:conv_transpose",
        "(inputs, kernel, strides=1, padding='valid', output_padding=None, data_format=None, dilation_rate=1)",
        why="the same",
    )
    depthwise_conv = patch(
        "backend.tensorflow.nn:depthwise_conv",
        "(inputs, kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="the same",
    )
    separable_conv = patch(
        "backend.tensorflow.nn:separable_conv",
        "(inputs, depthwise_kernel, pointwise_kernel, strides=1, padding='valid', data_format=None, dilation_rate=1)",
        why="the same",
    )
    max_pool = patch(
        "backend.tensorflow.nn:max_pool", "(inputs, pool_size, strides=None, padding='valid', data_format=None)",
        why="the same",
    )
    ctc_loss = patch(
        "backend.tensorflow.nn:ctc_loss", "(target, output, target_length, output_length, mask_index=0)",
        why="TensorFlow has no loss of no sequences",
    )
    ctc_decode = patch(
        "backend.tensorflow.nn:ctc_decode",
        "(inputs, sequence_lengths, strategy='greedy', beam_width=100, top_paths=1, merge_repeated=True, mask_index=0)",
        why="TensorFlow refuses to decode no sequences",
    )
    map_rows = patch(
        "backend.tensorflow.core:map", "(f, xs)",
        why="Keras would take the first row",
    )
    transform_images = patch(
        "layers.preprocessing.image_preprocessing.base_image_preprocessing_layer:BaseImagePreprocessingLayer.call",
        "(self, data, training=True)",
        why="some of these layers look at the first image",
    )
    add = patch(
        "backend.tensorflow.numpy:add", "(x1, x2)",
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
        why="a full disk is an error; HDF5 would end Python", does=hdf5_files.open_of_store,
    )
    get_file = patch(
        "utils.file_utils:get_file",
        "(fname=None, origin=None, untar=False, md5_hash=None, file_hash=None, cache_subdir='datasets', hash_algorithm='auto',"
        " extract=False, archive_format='auto', cache_dir=None, force_download=False)",
        why="a destination is fetched by one process of a machine at a time", everywhere=True,
        does=files.get_file_once,
    )
    urlretrieve = patch(
        "utils.file_utils:urlretrieve", "(url, filename=None, reporthook=None, data=None)",
        why="a file has its name when it is complete; rank 0 draws the bar", does=files.download_whole,
    )

    _process = Topic(
        "Process", "These are functions of modules, and what they change belongs to the whole process.", driver=driver_in_scope
    )

    clear_session = patch(
        "backend.common.global_state:clear_session", "(free_memory=True)", everywhere=True,
        why="the scope outlives it", does=session.clear_but_keep_scope,
    )
    warnings = patch(
        "warnings", everywhere=True, instead=warnings_of_keras.WarningsOfKeras(),
        why="a warning blames the line that plain Keras blames: frames of this package do not count",
    )

    # fmt: on
