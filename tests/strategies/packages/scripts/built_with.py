"""Trains the smallest telling model of a package around Keras: `python built_with.py PACKAGE`. It prints losses and weights."""

import json
import sys

import keras
import numpy as np

import tfrep_strategy as tfrep

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


def of_keras_hub_layouts():
    """Gemma with the layouts that KerasHub gives for it, of all devices there are."""
    import keras_hub
    from keras import distribution

    devices = distribution.list_devices()
    split = min(2, len(devices))
    mesh = distribution.DeviceMesh((len(devices) // split, split), ["batch", "model"], devices)
    layouts = keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    if len(devices) > 1:
        distribution.set_distribution(distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=32, num_layers=1, num_query_heads=4, num_key_value_heads=2, hidden_dim=8, intermediate_dim=16, head_dim=4
    )
    model = keras.Model(backbone.inputs, backbone.token_embedding(backbone.output, reverse=True))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = rng.integers(0, 32, (24, 6))
    return model, ({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, 1))


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


def of_shap():
    import shap

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    x = rng.normal(size=(24, 4)).astype("f")
    model.fit(x, x[:, :2] * x[:, 2:], batch_size=8, epochs=2, shuffle=False, verbose=0)
    by_gradients = shap.GradientExplainer(model, x[:16]).shap_values(x[16:], nsamples=20, rseed=3)
    asked = shap.KernelExplainer(lambda rows: model.predict(rows, verbose=0), x[:8])  # It draws from NumPy's global state.
    print("RESULT", json.dumps([np.asarray(by_gradients).tolist(), asked.shap_values(x[20:], nsamples=12, silent=True).tolist()]))
    return None, None


def of_tensorflow_datasets():
    import tensorflow_datasets as tfds

    class Digits(tfds.core.GeneratorBasedBuilder):
        """Pictures that are drawn here."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"image": tfds.features.Image(shape=(4, 4, 1)), "label": tfds.features.ClassLabel(num_classes=3)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(30), "test": self._generate_examples(11)}

        def _generate_examples(self, number):
            for row in range(number):
                yield row, {"image": rng.integers(0, 255, (4, 4, 1), "uint8"), "label": row % 3}

    builder = Digits(data_dir="data")
    with tfrep.chief_first():
        builder.download_and_prepare()
    keras.utils.set_random_seed(2)  # The rank that prepares the data has drawn from Python's generator.
    config = tfds.ReadConfig(shuffle_seed=3)
    train, test = builder.as_dataset(split=["train", "test"], as_supervised=True, shuffle_files=True, read_config=config)
    layers = [keras.Input((4, 4, 1)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    seen = model.fit(train.shuffle(30, seed=4).batch(8), validation_data=test.batch(4), epochs=2, verbose=0).history
    print("RESULT", json.dumps([*seen.values(), [int(label) for _, label in tfds.as_numpy(test)]]))
    return None, None


made, data = globals()[f"of_{package}"]()
if made is not None:
    history = made.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    print("RESULT", json.dumps([history, float(sum(np.abs(w).sum() for w in made.get_weights()))]))
