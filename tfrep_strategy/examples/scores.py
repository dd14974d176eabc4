"""How good samples are."""

from __future__ import annotations

import numpy as np

from tfrep_strategy.errors import ConfigurationError, message


def inception_score(probabilities: np.ndarray) -> float:
    """Scores samples by what a classifier sees in them: `exp(mean KL(p(class | sample) || p(class)))`.

    It is high if the classifier is sure of each sample, and sees all classes equally often.

    Args:
        probabilities: Of shape `[samples, classes]`, where each row adds up to 1.

    Returns:
        Between 1 and the number of classes.

    Raises:
        ConfigurationError: The rows are no probabilities.

    Example:
        >>> round(inception_score(np.eye(10)), 3), round(inception_score(np.full([5, 10], 0.1)), 3)
        (10.0, 1.0)
    """
    p = np.asarray(probabilities, np.float64)
    if p.ndim != 2 or not len(p) or (p < 0).any() or not np.allclose(p.sum(1), 1, atol=1e-3):
        hint = "pass softmax outputs, a row for each sample."
        raise ConfigurationError(message("These are no probabilities of classes.", hint=hint, shape=p.shape))
    marginal = p.mean(0)
    ratio = np.divide(p, marginal, out=np.ones_like(p), where=p > 0)
    return float(np.exp((p * np.log(ratio)).sum(1).mean()))
