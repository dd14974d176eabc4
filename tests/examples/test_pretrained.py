"""Trained weights that are there, and those that are missing."""

from __future__ import annotations

import functools
import socket

import keras
import numpy as np
import pytest

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.examples.pretrained import load_pretrained

pytestmark = pytest.mark.lane("quick")

application = functools.partial(keras.applications.MobileNet, alpha=0.25, input_shape=(32, 32, 3))


def test_the_weights_of_a_file(tmp_path):
    trained = application(weights=None, include_top=False)
    path = tmp_path / "trained.weights.h5"
    trained.save_weights(path)
    loaded = load_pretrained(application, path, include_top=False)
    for of_loaded, of_trained in zip(loaded.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(of_loaded, of_trained)
    with pytest.raises(ConfigurationError, match=r"(?s)do not fit the model.*trained\.weights\.h5.*include_top"):
        load_pretrained(application, path, include_top=True, classes=7)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigurationError, match=r"(?s)no such file of weights.*gone\.weights\.h5"):
        load_pretrained(application, tmp_path / "gone.weights.h5", include_top=False)


def test_a_file_without_weights(tmp_path):
    path = tmp_path / "text.weights.h5"
    path.write_text("no weights", "utf-8")
    with pytest.raises(ConfigurationError, match="do not fit the model"):
        load_pretrained(application, path, include_top=False)


def test_weights_that_cannot_be_fetched(tmp_path):
    with socket.socket() as nobody:  # It does not listen, so connections are refused.
        nobody.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{nobody.getsockname()[1]}/weights.h5"

        def fetch(weights):
            assert weights == "imagenet"
            return keras.utils.get_file("weights.h5", origin, cache_dir=tmp_path)

        with pytest.raises(ConfigurationError, match="(?s)cannot be fetched.*imagenet.*pass the path"):
            load_pretrained(fetch)


def test_other_errors_stay_as_they_are():
    with pytest.raises(ValueError, match="input"):
        load_pretrained(lambda weights: application(weights=None, input_tensor=3))
