"""What every replica runs in the tests of the collectives, and what one device with all their values would get."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfrep_strategy as tfrep

NUMBERS = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
           "uint64", "complex64", "complex128"]  # fmt: skip
DTYPES = [*NUMBERS, "bool", "string"]
FEW = ["bfloat16", "float32", "int64", "uint8", "bool", "string"]
OPS = ["sum", "mean", "min", "max", "product"]
MODES = ["eager", "function", "layer", "cond", "while", "nested"]


def ops_of(dtype):
    if dtype == "string":
        return []
    if dtype == "bool":
        return ["min", "max"]
    return [op for op in OPS if not (dtype.startswith("complex") and op in ("min", "max"))]


def value(dtype, replica, rows=4):
    """Small whole numbers, so that sums and products are exact in every dtype; shape [rows, 3]."""
    numbers = (np.arange(rows * 3).reshape(rows, 3) + 5 * replica) % 3 + 1
    if dtype == "string":
        return np.array([[f"r{replica}" + "é" * int(n) for n in row] for row in numbers], dtype=object).reshape(rows, 3)
    if dtype == "bool":
        return numbers > 1
    if dtype.startswith("complex"):
        return (numbers + 1j * (replica - 1)).astype(dtype)
    return numbers.astype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)


def tensors(replica):
    result = {}
    for dtype in DTYPES:
        result[dtype] = tf.constant(value(dtype, replica), dtype)
        result["ragged " + dtype] = tf.constant(value(dtype, replica, rows=replica + 1), dtype)
    return result


def forward(x, size, group=None, dtypes=DTYPES):
    """Calls every primitive on every dtype that it takes."""
    last = size - 1
    splits = [1] * last + [4 - last]
    out = {}
    for dtype in dtypes:
        v = x[dtype]
        for op in ops_of(dtype):
            out["all_reduce", op, dtype] = tfrep.all_reduce(v, op, group=group)
            out["reduce_scatter", op, dtype] = tfrep.reduce_scatter(v, op, group=group)
        out["all_gather", "rows", dtype] = tfrep.all_gather(x["ragged " + dtype], group=group)
        out["all_gather", "columns", dtype] = tfrep.all_gather(v, axis=-1, group=group)
        out["all_gather", "stack", dtype] = tfrep.all_gather(v, stack=True, group=group)
        out["broadcast", "last", dtype] = tfrep.broadcast(v, last if group is None else group.replicas[-1], group=group)
        out["all_to_all", "splits", dtype], out["all_to_all", "received", dtype] = tfrep.all_to_all(v, splits, group=group)
        if 4 % size == 0:
            out["all_to_all", "even", dtype] = tfrep.all_to_all(v, group=group)
    return out


def expected_forward(members, rank, dtypes=DTYPES):
    """What `forward` gives the member of that rank; in NumPy."""
    size, last = len(members), len(members) - 1
    splits = [1] * last + [4 - last]
    starts = np.cumsum([0, *splits])
    out = {}
    for dtype in dtypes:
        values = [value(dtype, r) for r in members]
        for op in ops_of(dtype):
            reduced = reduce_numpy(values, op)
            out["all_reduce", op, dtype] = reduced
            out["reduce_scatter", op, dtype] = np.array_split(reduced, size)[rank]
        out["all_gather", "rows", dtype] = np.concatenate([value(dtype, r, rows=r + 1) for r in members])
        out["all_gather", "columns", dtype] = np.concatenate(values, -1)
        out["all_gather", "stack", dtype] = np.stack(values)
        out["broadcast", "last", dtype] = values[-1]
        out["all_to_all", "splits", dtype] = np.concatenate([v[starts[rank] : starts[rank + 1]] for v in values])
        out["all_to_all", "received", dtype] = np.full(size, splits[rank])
        if 4 % size == 0:
            out["all_to_all", "even", dtype] = np.concatenate([np.split(v, size)[rank] for v in values])
    return out


def reduce_numpy(values, op):
    stack = np.stack(values)
    if stack.dtype == bool:
        return stack.all(0) if op == "min" else stack.any(0)
    if op == "mean":
        wide = stack.astype(np.complex128 if stack.dtype.kind == "c" else np.float64).mean(0)
        return (np.trunc(wide) if stack.dtype.kind in "iu" else wide).astype(stack.dtype)
    if op in ("min", "max"):
        return getattr(stack, op)(0)
    return (stack.sum(0) if op == "sum" else stack.prod(0)).astype(stack.dtype)


def check_forward(found, members, rank, dtypes):
    expected = expected_forward(members, rank, dtypes)
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        got = found[key]
        if key[-1] == "string" and key[1] != "received":
            got = np.vectorize(bytes.decode, otypes=[object])(got) if got.size else got
            assert got.tolist() == wanted.tolist(), key
        elif key[-1] in ("float16", "bfloat16") and key[1] == "mean":
            np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=1e-2, err_msg=str(key))
        else:
            np.testing.assert_allclose(got, wanted, rtol=1e-6, err_msg=str(key))
            if key[1] != "received":
                assert got.dtype == wanted.dtype, key


class Calls(keras.layers.Layer):
    """A layer whose `call` talks to the other replicas."""

    def __init__(self, fn):
        super().__init__(autocast=False)
        self.fn = fn

    def call(self, x):
        return self.fn(x)


def in_mode(mode, fn, otherwise=None):
    """Wraps `fn`, from a tensor or dict of tensors to a tensor or dict, in what the mode puts around it.

    `otherwise` gives anything of the structure and dtypes of what `fn` gives; by default that is what `fn` gives.
    """
    if mode == "layer":
        return Calls(fn)
    if mode == "cond":
        return lambda x: tf.cond(tf.identity(True), lambda: fn(x), otherwise or (lambda: fn(x)))
    if mode == "nested":
        return tf.function(fn, autograph=False)
    if mode == "while":

        def loop(x):
            first = otherwise() if otherwise else tf.zeros_like(fn(x))
            free = tf.nest.map_structure(lambda t: tf.TensorShape(None), first)
            return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, fn(x)), (0, first), (tf.TensorShape([]), free))[1]

        return loop
    return fn


def on_replicas(strategy, step, mode):
    """Runs `step(replica)` on every replica; returns the results of this process's replicas as NumPy, in order."""

    def run():
        return strategy.run(lambda: step(tfrep.replica_id()))

    if mode != "eager":
        run = tf.function(run, autograph=False)
    with strategy.scope():
        result = run()
    count = strategy.extended.num_local_replicas
    return [
        tf.nest.map_structure(lambda v, i=i: strategy.experimental_local_results(v)[min(i, _n(strategy, v) - 1)].numpy(), result)
        for i in range(count)
    ]


def _n(strategy, v):
    return len(strategy.experimental_local_results(v))


def run_forward(strategy, mode, members=None, dtypes=DTYPES):
    """Runs every primitive and checks it; `members` puts them into a group."""
    size = strategy.num_replicas_in_sync
    group = None if members is None else strategy.new_group(members)
    members = list(range(size)) if members is None else members
    names = {}

    def step(replica):
        def call(x):
            out = forward({k.replace("_", " "): v for k, v in x.items()}, len(members), group, dtypes)
            names.update({"/".join(k): k for k in out})
            return {"/".join(k): v for k, v in out.items()}

        def otherwise():
            keys = expected_forward(members, 0, dtypes)
            return {"/".join(k): tf.zeros([], "int32" if k[1] == "received" else k[2]) for k in keys}

        return in_mode(mode, call, otherwise)({k.replace(" ", "_"): v for k, v in tensors(replica).items()})

    first = strategy.extended.first_local_replica
    for i, result in enumerate(on_replicas(strategy, step, mode)):
        replica = first + i
        if replica in members:
            check_forward({names[k]: v for k, v in result.items()}, members, members.index(replica), dtypes)


# Gradients.

DIFFERENTIABLE = ["float16", "bfloat16", "float32", "float64", "complex64"]


def gradient_value(dtype, replica, rows=4):
    numbers = ((np.arange(rows * 3).reshape(rows, 3) * 7 + 3 * replica) % 5) / 2
    if dtype == "complex64":
        return tf.constant(numbers + 1j * (replica + 1), dtype)
    return tf.cast(tf.constant(numbers), dtype)


def sensitivity(shape, dtype, replica):
    """The weights with which an output enters the loss of a replica."""
    count = tf.cast(tf.range(tf.reduce_prod(shape)) % 7 + 1 + replica, tf.float32)
    return tf.cast(tf.reshape(count, shape), dtype)


def differentiable(x, ragged, size, dtype):
    ops = ops_of(dtype)
    last = size - 1
    splits = [1] * last + [4 - last]
    out = {f"all_reduce {op}": lambda op=op: tfrep.all_reduce(x, op) for op in ops}
    out |= {f"reduce_scatter {op}": lambda op=op: tfrep.reduce_scatter(x, op) for op in ops}
    out["all_gather"] = lambda: tfrep.all_gather(ragged)
    out["all_gather columns"] = lambda: tfrep.all_gather(x, axis=1)
    out["all_gather stack"] = lambda: tfrep.all_gather(x, stack=True)
    out["broadcast"] = lambda: tfrep.broadcast(x, last)
    out["all_to_all"] = lambda: tfrep.all_to_all(x, splits)[0]
    out["map_gather"] = lambda: tf.stack(tfrep.map_gather(lambda k: k * x[0], [tf.cast(k, dtype) for k in (2, 3, 4)]))
    if not dtype.startswith("complex"):
        out["map_reduce"] = lambda: tfrep.map_reduce(lambda k: k * x[0], [tf.cast(k, dtype) for k in (2, 3, 4)], "mean")
    return out


def expected_outputs(name, xs, rags):
    """One device's computation of what each replica would get."""
    size, last = len(xs), len(xs) - 1
    splits = [1] * last + [4 - last]
    kind, _, option = name.partition(" ")
    reductions = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "min": tf.reduce_min, "max": tf.reduce_max,
                  "product": tf.reduce_prod}  # fmt: skip
    if kind in ("all_reduce", "reduce_scatter"):
        y = reductions[option](tf.stack(xs), 0)
        sizes = [4 // size + (r < 4 % size) for r in range(size)]
        return [y] * size if kind == "all_reduce" else tf.split(y, sizes)
    if kind == "all_gather":
        y = {"": lambda: tf.concat(rags, 0), "columns": lambda: tf.concat(xs, 1), "stack": lambda: tf.stack(xs)}[option]()
        return [y] * size
    if kind == "broadcast":
        return [xs[-1]] * size
    if kind == "all_to_all":
        parts = [tf.split(x, splits) for x in xs]
        return [tf.concat([p[r] for p in parts], 0) for r in range(size)]
    items = [tf.cast(k, xs[0].dtype) * xs[i % size][0] for i, k in enumerate((2, 3, 4))]
    return [tf.stack(items) if kind == "map_gather" else tf.add_n(items) / 3] * size


def run_gradients(strategy, mode, dtypes=DIFFERENTIABLE):
    """Compares the gradients of `sum_r loss_r` with those of one device that has all values."""
    size = strategy.num_replicas_in_sync
    names = {}

    def step(replica):
        result = {}
        for dtype in dtypes:
            for name in differentiable(tf.zeros([4, 3], dtype), tf.zeros([1, 3], dtype), size, dtype):
                x, ragged = gradient_value(dtype, replica), gradient_value(dtype, replica, rows=replica + 1)
                names[f"{dtype}/{name}"] = dtype, name

                def call(v, name=name, dtype=dtype):
                    return differentiable(v["x"], v["ragged"], size, dtype)[name]()

                with tf.GradientTape() as tape:
                    tape.watch([x, ragged])
                    y = in_mode(mode, call)({"x": x, "ragged": ragged})
                    loss = tf.reduce_sum(tf.math.real(y * sensitivity(tf.shape(y), dtype, replica)))
                used = ragged if name == "all_gather" else x
                result[f"{dtype}/{name}"] = tape.gradient(loss, used)
        return result

    found = on_replicas(strategy, step, mode)
    for key, (dtype, name) in names.items():
        xs = [gradient_value(dtype, r) for r in range(size)]
        rags = [gradient_value(dtype, r, rows=r + 1) for r in range(size)]
        used = rags if name == "all_gather" else xs
        with tf.GradientTape() as tape:
            tape.watch([xs, rags])
            outputs = expected_outputs(name, xs, rags)
            losses = [
                tf.reduce_sum(tf.math.real(y * sensitivity(tf.shape(y), dtype, r))) for r, y in enumerate(outputs)
            ]
            loss = tf.add_n(losses)
        wanted = tape.gradient(loss, used, unconnected_gradients="zero")
        for i, result in enumerate(found):
            expected = wanted[strategy.extended.first_local_replica + i].numpy()
            tolerance = 3e-2 if dtype in ("float16", "bfloat16") else 1e-5
            wide = np.complex128 if dtype == "complex64" else np.float64
            np.testing.assert_allclose(
                result[key].astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance, err_msg=f"{key} {mode}"
            )


# In `fit`.


class Centered(keras.layers.Layer):
    """Takes away the mean of the global batch, in a way that gradients of uneven parts are right only if they are weighed."""

    def call(self, x):
        total = tfrep.all_sum(tf.reduce_sum(x, 0))
        return x - total / tfrep.all_sum(tf.cast(tf.shape(x)[0], x.dtype))


def weights_after_fit(strategy, gather):
    """Fits a model with collectives in a layer, on batches that do not divide."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(37, 3)).astype("float32"), rng.normal(size=(37, 1)).astype("float32")
    with strategy.scope() if strategy else tf.name_scope("none"):
        inputs = keras.Input((3,))
        h = keras.layers.Dense(4, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(1))(inputs)
        h = Centered()(h)
        if gather:
            h = Contrast()(h)
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))(h))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


class Contrast(keras.layers.Layer):
    """Compares each row with all rows of the global batch, as contrastive losses do."""

    def call(self, x):
        return x + tf.matmul(tf.nn.softmax(tf.matmul(x, tfrep.all_gather(x), transpose_b=True)), tfrep.all_gather(x))
