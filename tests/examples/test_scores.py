"""The score of samples."""

from __future__ import annotations

import numpy as np
import pytest

from tfrep_strategy.errors import ConfigurationError
from tfrep_strategy.examples.scores import inception_score

pytestmark = pytest.mark.lane("quick")


def test_it_is_its_formula():
    p = np.random.default_rng(0).dirichlet(np.ones(10), size=50)
    entropy_of_mean = -(p.mean(0) * np.log(p.mean(0))).sum()
    mean_of_entropies = -(p * np.log(p)).sum(1).mean()
    assert inception_score(p) == pytest.approx(np.exp(entropy_of_mean - mean_of_entropies))


def test_certain_samples_score_the_number_of_classes_they_cover():
    assert inception_score(np.eye(10)[[0, 1, 2, 0, 1, 2]]) == pytest.approx(3)
    assert inception_score(np.eye(10)[[4, 4, 4]]) == pytest.approx(1)


@pytest.mark.parametrize("wrong", [np.ones([3, 4]), np.ones(4) / 4, np.zeros([0, 4]), np.array([[1.5, -0.5]])])
def test_what_is_no_probability(wrong):
    with pytest.raises(ConfigurationError, match="no probabilities"):
        inception_score(wrong)
