"""Variables in parts on two servers, behind `keras.Variable`."""

from __future__ import annotations

from pathlib import Path

from parameter_server_support import run

_MODEL = """
partitioners = tf.distribute.experimental.partitioners

def model(optimizer, rows=50, seed=None):
    init = lambda k: keras.initializers.RandomUniform(-0.5, 0.5, seed=k)
    layers = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(rows, 8, embeddings_initializer=init(1)),
        keras.layers.Flatten(),
        keras.layers.Dense(7, "tanh", kernel_initializer=init(2)),
        keras.layers.Dense(1, kernel_initializer=init(3)),
    ]
    made = keras.Sequential(layers)
    made.compile(optimizer, "mse")
    return made

rng = np.random.RandomState(0)
ids, targets = rng.randint(0, 50, (120, 3)), rng.randn(120, 1).astype("float32")
"""


def test_training_saving_and_loading(tmp_path: Path) -> None:
    """One worker, so that the steps have the order of one device: the same weights come out."""
    code = (
        _MODEL
        + """
with tfrep.local_cluster(workers=1, servers=2) as cluster:
    strategy = tfrep.ParameterServerStrategy(cluster, partitioners.FixedShardsPartitioner(2))
    for make in (lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1, momentum=0.9)):
        with strategy.scope():
            whole = model(make())
        parts = {v.path.split("/", 1)[1]: v._value for v in whole.variables}
        assert [p.shape[0] for p in parts["embedding" + whole.layers[0].name[9:] + "/embeddings"].variables] == [25, 25]
        devices = {p.device for p in whole.layers[0].embeddings._value.variables}
        assert len(devices) == 2, devices
        single = model(make())
        np.testing.assert_array_equal(single.get_weights()[0].shape, (50, 8))
        single.set_weights(whole.get_weights())
        whole.fit(ids, targets, batch_size=10, epochs=2, shuffle=False, verbose=0)
        single.fit(ids, targets, batch_size=10, epochs=2, shuffle=False, verbose=0)
        for a, b in zip(whole.get_weights(), single.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(whole.predict(ids, verbose=0), single.predict(ids, verbose=0), rtol=1e-4, atol=1e-6)

    whole.save("whole.keras")
    whole.save_weights("whole.weights.h5")
    loaded = keras.models.load_model("whole.keras")
    np.testing.assert_allclose(loaded.predict(ids, verbose=0), whole.predict(ids, verbose=0), rtol=1e-5, atol=1e-6)
    for a, b in zip(loaded.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-6)
    single.load_weights("whole.weights.h5")
    single.fit(ids, targets, epochs=1, verbose=0)
    single.save("single.keras")
    with strategy.scope():
        back = keras.models.load_model("single.keras")
    assert len(back.layers[0].embeddings._value.variables) == 2
    np.testing.assert_allclose(back.predict(ids, verbose=0), single.predict(ids, verbose=0), rtol=1e-5, atol=1e-6)
    print("held")
"""
    )
    status, out, err = run(code, folder=tmp_path)
    assert status == 0, err[-3000:]
    assert out.endswith("held\n")


def test_each_part_is_made_where_it_is(tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
asked = []

class Watched(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        asked.append(tuple(shape))
        return tf.reshape(tf.range(np.prod(shape), dtype=dtype), shape)

with tfrep.local_cluster(workers=1, servers=2) as cluster:
    strategy = tfrep.ParameterServerStrategy(cluster, partitioners.FixedShardsPartitioner(2))
    initializers = keras.initializers
    drawn = initializers.RandomUniform.__call__
    initializers.RandomUniform.__call__ = lambda self, shape, dtype=None: asked.append(tuple(shape)) or drawn(self, shape, dtype)
    with strategy.scope():
        made = {name: keras.Variable(initializer, shape=(51, 4)) for name, initializer in dict(
            uniform=initializers.RandomUniform(0.0, 1.0, seed=3), zeros="zeros", whole=Watched(),
            rows=initializers.Constant(np.arange(4.0)), glorot=initializers.GlorotUniform(seed=1),
        ).items()}
        optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
        optimizer.build([made["uniform"]])
    assert asked == [(26, 4), (25, 4), (51, 4), (51, 4)], asked
    assert all(len(variable._value.variables) == 2 for variable in made.values())
    uniform = made["uniform"].numpy()
    assert len(np.unique(uniform)) == uniform.size and 0.4 < uniform.mean() < 0.6
    np.testing.assert_array_equal(made["zeros"].numpy(), 0.0)
    np.testing.assert_array_equal(made["whole"].numpy(), np.arange(204.0).reshape(51, 4))
    np.testing.assert_array_equal(made["rows"].numpy(), np.tile(np.arange(4.0), (51, 1)))
    np.testing.assert_array_equal(made["glorot"].numpy(), initializers.GlorotUniform(seed=1)((51, 4)))
    (slot,) = optimizer._accumulators
    np.testing.assert_array_equal(slot.numpy(), 0.5)
    assert [p.device for p in slot._value.variables] == [p.device for p in made["uniform"]._value.variables]
    print("held")
"""
    )
    status, out, err = run(code, folder=tmp_path)
    assert status == 0, err[-3000:]
    assert out.endswith("held\n")


def test_all_optimizers_and_partitioners(tmp_path: Path) -> None:
    """Dense and sparse gradients change a variable in parts as they change a whole one."""
    code = (
        _MODEL
        + """
import contextlib
optimizers = keras.optimizers
makes = {name: lambda name=name: getattr(optimizers, name)(0.1) for name in (
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb", "Adafactor", "Muon"
)}
makes["decay, clipping"] = lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, global_clipnorm=0.5)
makes["accumulation, average"] = lambda: optimizers.Adam(
    0.1, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2, clipnorm=0.1
)
makes["scaled"] = lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=2.0)
start, dense = rng.randn(6, 4).astype("float32"), tf.constant(rng.randn(6, 4), tf.float32)
sparse = tf.IndexedSlices(tf.constant(rng.randn(3, 4), tf.float32), tf.constant([1, 4, 4]), tf.constant([6, 4]))

def updated(make, strategy):
    with strategy.scope():
        optimizer = make()
        variable = keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype), shape=(6, 4), dtype="float32")
        optimizer.build([variable])
    variable.assign(start)
    apply = lambda gradient: strategy.run(lambda: optimizer.apply([gradient], [variable]))
    apply_dense, apply_sparse = tf.function(lambda: apply(dense)), tf.function(lambda: apply(sparse))
    tracing = getattr(strategy, "tracing", contextlib.nullcontext)
    with strategy.scope(), tracing():
        for function in (apply_dense, apply_sparse, apply_sparse, apply_dense):
            function()
    return variable

with tfrep.local_cluster(workers=1, servers=2) as cluster:
    strategy = tfrep.ParameterServerStrategy(cluster, partitioners.FixedShardsPartitioner(2))
    for name, make in makes.items():
        parts, whole = updated(make, strategy), updated(make, tf.distribute.get_strategy())
        assert len(parts._value.variables) == 2
        np.testing.assert_allclose(parts.numpy(), whole.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)

    counts = {}
    for partitioner in (partitioners.MinSizePartitioner(64, 2), partitioners.MaxSizePartitioner(32)):
        strategy = tfrep.ParameterServerStrategy(cluster, partitioner)
        with strategy.scope():
            made = model(keras.optimizers.SGD(0.1), rows=8)
        made.fit(ids % 8, targets, batch_size=30, verbose=0)
        counts[type(partitioner).__name__] = len(made.layers[0].embeddings._value.variables)
    assert counts == {"MinSizePartitioner": 2, "MaxSizePartitioner": 8}, counts  # 8 rows of 32 bytes
    print("held")
"""
    )
    status, out, err = run(code, folder=tmp_path)
    assert status == 0, out + err[-3000:]
    assert out.endswith("held\n")


def test_bytes_follow_the_rows_that_are_used_and_not_the_table(tmp_path: Path) -> None:
    code = (
        _MODEL
        + """
import psutil

WIDTH, ROW_BYTES = 256, 1024

def loopback():
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent

class Bytes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.before = loopback()
    def on_epoch_end(self, epoch, logs=None):
        epochs.append(loopback() - self.before)

moved = {}
with tfrep.local_cluster(workers=1, servers=2) as cluster:
    strategy = tfrep.ParameterServerStrategy(cluster, partitioners.MinSizePartitioner(1 << 16, 2))
    for rows, used in ((1_000, 30), (50_000, 30), (50_000, 300)):
        with strategy.scope():
            embedding = keras.layers.Embedding(rows, WIDTH)
            layers = [keras.Input((3,), dtype="int32"), embedding, keras.layers.GlobalAveragePooling1D()]
            made = keras.Sequential([*layers, keras.layers.Dense(1)])
            made.compile(keras.optimizers.SGD(0.1), "mse")
        distinct = rng.permutation(rows)[:used].reshape(-1, 3)
        batch = tf.data.Dataset.from_tensors((distinct, np.zeros((len(distinct), 1), "float32"))).repeat()
        epochs = []
        made.fit(batch, steps_per_epoch=10, epochs=6, verbose=0, callbacks=[Bytes()])
        assert len(embedding.embeddings._value.variables) == 2
        # Whatever else this machine sends meanwhile only adds to it.
        moved[rows, used] = min(epochs[1:]) / 10
        print(f"table of {rows * ROW_BYTES:11,d} bytes, {used:3d} rows used: {moved[rows, used]:9,.0f} bytes per step")

small, large, more = moved.values()
assert large < small + 100 * ROW_BYTES, moved  # The table has 49,000 rows more.
# A row comes from its server, and its gradient goes back.
assert 1.5 < (more - large) / (270 * ROW_BYTES) < 4.0, moved
print("held")
"""
    )
    status, out, err = run(code, folder=tmp_path)
    assert status == 0, out + err[-3000:]
    assert out.endswith("held\n")
    print(out)
