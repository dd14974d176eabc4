"""How far one device rounds: `python -m benchmarks.rounding`.

Trains the net of `tfrep doctor --gpus` on one device, then again with a change that exact arithmetic would hardly notice, and
prints the largest difference between two weights. The bounds of that command come from these numbers. On CPUs, oneDNN rounds less
than TensorFlow's own kernels, which run with `TF_ENABLE_ONEDNN_OPTS=0`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfrep_strategy.contrib.gpu_report.programs import convnet, images

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "bfloat16")
_EXAMPLES, _BATCH = 64, 16

Weights = list[np.ndarray]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints a table.

    Args:
        arguments: The command line; by default this process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, metavar="POLICY", help=str(list(POLICIES)))
    parser.add_argument("--seeds", type=int, default=5, help="how often each change is drawn")
    chosen = parser.parse_args(arguments)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    table = Table("dtype policy", "bias of the convolution", *CHANGES, title="Largest difference of a weight of one device")
    for policy in chosen.policies:
        for conv_bias in (False, True):
            found = largest_differences(policy, conv_bias, chosen.seeds)
            table.add_row(policy, "yes" if conv_bias else "no", *(f"{found[change]:.1e}" for change in CHANGES))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def largest_differences(policy: str, conv_bias: bool, seeds: int) -> dict[str, float]:
    """Trains with a policy, as it is and with each change.

    Args:
        policy: The dtype policy.
        conv_bias: Whether the convolution has a bias.
        seeds: How often each change is drawn.

    Returns:
        The largest difference of a weight, by the name of the change.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        unchanged = _trained(*images(_EXAMPLES), conv_bias)
        return {
            name: max(_gap(change(np.random.default_rng(seed), conv_bias), unchanged) for seed in range(seeds))
            for name, change in CHANGES.items()
        }
    finally:
        keras.config.set_dtype_policy(before)


def _last_bit(random: np.random.Generator, conv_bias: bool) -> Weights:
    """Moves each input to the next number of the dtype in which the model computes, up or down."""
    x, y = images(_EXAMPLES)
    dtype = tf.as_dtype(keras.config.dtype_policy().compute_dtype).as_numpy_dtype
    towards = random.choice([-np.inf, np.inf], x.shape).astype(dtype)
    return _trained(np.nextafter(x.astype(dtype), towards).astype(np.float32), y, conv_bias)


def _order(random: np.random.Generator, conv_bias: bool, parts: int = 1) -> Weights:
    """Gives the rows of each batch in another order, and adds up its gradient from several parts."""
    x, y = images(_EXAMPLES)
    rows = np.concatenate([start + random.permutation(_BATCH) for start in range(0, _EXAMPLES, _BATCH)])
    return _trained(x[rows], y[rows], conv_bias, parts)


CHANGES: dict[str, Callable[[np.random.Generator, bool], Weights]] = {
    "last bit of the inputs": _last_bit,
    "order of the rows": _order,
    "order, two halves": partial(_order, parts=2),
}
"""What is changed, by its name."""


def _trained(x: np.ndarray, y: np.ndarray, conv_bias: bool, parts: int = 1) -> Weights:
    keras.utils.set_random_seed(0)
    model = convnet(conv_bias=conv_bias)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=parts if parts > 1 else None),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.fit(x, y, batch_size=_BATCH // parts, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(weight, np.float64) for weight in model.get_weights()]


def _gap(found: Weights, expected: Weights) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
