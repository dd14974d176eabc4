"""Trains the smallest telling model of a package around Keras: `python built_with.py PACKAGE`. It prints losses and weights."""

import json
import sys

import keras
import numpy as np

package = sys.argv[1]
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)


def of_keras_hub():
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=40, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, max_sequence_length=6, dropout=0.0
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = rng.integers(1, 40, (24, 6))
    x = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": np.ones_like(tokens)}
    return model, (x, rng.integers(0, 3, 24))


def of_keras_rs():
    import keras_rs

    inputs = keras.Input((4,))
    crossed = keras_rs.layers.FeatureCross(kernel_initializer=keras.initializers.GlorotUniform(3))(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(crossed))
    model.compile(keras.optimizers.SGD(0.05), keras_rs.losses.PairwiseHingeLoss())
    return model, (rng.normal(size=(24, 4)).astype("f"), rng.integers(0, 3, (24, 3)).astype("f"))


def of_scikeras():
    from scikeras.wrappers import KerasRegressor

    def build():
        layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    x = rng.normal(size=(24, 4)).astype("f")
    wrapped = KerasRegressor(build, loss="mse", optimizer="adam", batch_size=8, epochs=2, shuffle=False, verbose=0)
    wrapped.fit(x, x.sum(1))
    print("RESULT", json.dumps([wrapped.history_["loss"], float(np.abs(wrapped.predict(x)).sum())]))
    return None, None


def of_bayesflow():
    import bayesflow as bf

    simulator = bf.make_simulator([lambda: {"theta": rng.normal(size=2)}, lambda theta: {"x": rng.normal(theta, 0.1, size=(5, 2))}])
    adapter = bf.Adapter().convert_dtype("float64", "float32").concatenate(["theta"], into="inference_variables")
    workflow = bf.BasicWorkflow(
        simulator=simulator,
        adapter=adapter.rename("x", "summary_variables"),
        inference_network=bf.networks.CouplingFlow(depth=1, transform="affine"),
        summary_network=bf.networks.DeepSet(depth=1),
    )
    print("RESULT", json.dumps(workflow.fit_offline(simulator.sample(64), epochs=2, batch_size=16, verbose=0).history["loss"]))
    return None, None


made, data = globals()[f"of_{package}"]()
if made is not None:
    history = made.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    print("RESULT", json.dumps([history, float(sum(np.abs(w).sum() for w in made.get_weights()))]))
