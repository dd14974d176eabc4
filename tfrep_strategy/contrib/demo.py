"""`tfrep demo`: trains one network on handwritten digits with every strategy and communicator, and compares the results."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfrep_strategy.cluster.hardware import problem_of_sharing, usable_cores, visible_gpus
from tfrep_strategy.cluster.identity import horovod_is_installed
from tfrep_strategy.contrib.digits import load_digits
from tfrep_strategy.errors import check_count, install_hint
from tfrep_strategy.running import launch
from tfrep_strategy.running.joining import refuse_inside_a_run
from tfrep_strategy.strategies.mirrored import MirroredStrategy, use_logical_cpus
from tfrep_strategy.strategies.multi_worker import MultiWorkerStrategy

ONE_DEVICE = "one device"
"""The reference variant: Keras without a strategy."""

_SECONDS_PER_VARIANT = 300.0
_WHY_NOT_FASTER = (
    "Do not expect two replicas to be faster here: they share {cores} that one device uses alone, and exchange gradients besides."
    " They show that the answer is the same. Replicas are faster where each has its own GPU or machine."
)


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        name: Its name in the table.
        strategy: "none", "mirrored" or "multi-worker".
        processes: How many processes take part.
        communicator: The communicator of the processes.
    """

    name: str
    strategy: str
    processes: int = 1
    communicator: str = "tf"


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        variant: The name of the variant.
        examples_per_second: Median over the epochs without the first, which compiles.
        accuracy: Accuracy on the test examples, between 0 and 1.
        largest_difference: Largest absolute difference of a weight from that of one device, over all processes.
        losses: Mean loss of each epoch.
    """

    variant: str
    examples_per_second: float
    accuracy: float
    largest_difference: float
    losses: list[float]


def variants() -> list[Variant]:
    """Lists the variants that can run here: one device first, then one for each installed communicator.

    Returns:
        The variants.

    Example:
        >>> [variant.name for variant in variants()][:2]
        ['one device', 'mirrored, 2 replicas']
    """
    communicators = [*["shared_memory"] * (problem_of_sharing(2) is None), *["horovod"] * horovod_is_installed(), "tf"]
    return [
        Variant(ONE_DEVICE, "none"),
        Variant("mirrored, 2 replicas", "mirrored"),
        *(Variant(f"2 processes, {name}", "multi-worker", 2, name) for name in communicators),
    ]


def run_demo(
    picture: str | os.PathLike[str] | None = "tfrep-demo.png",
    *,
    epochs: int = 12,
    examples: int | None = None,
    console: Console | None = None,
) -> list[Result]:
    """Trains all variants one after the other, shows a table and draws a picture.

    Args:
        picture: Path of the picture (PNG); None for no picture. Without matplotlib a line says how to get one.
        epochs: The number of epochs, at least 2, since the first is not timed.
        examples: How many examples to train on. Default: all 1,437.
        console: The console for the table. Default: the terminal.

    Returns:
        The lines of the table.

    Raises:
        ConfigurationError: There are too few epochs, or another launcher has started this process as one of several.
        PeerError: A process failed, or took more than 5 minutes.

    Example:
        >>> results = run_demo(None, epochs=2, examples=128, console=Console(file=open(os.devnull, "w")))
        >>> max(result.largest_difference for result in results) < 1e-5
        True
    """
    refuse_inside_a_run("`tfrep demo`")
    check_count("The demo needs at least 2 epochs, since the first is not timed.", 2, epochs=epochs)
    console = console or Console()
    begun = time.monotonic()
    results: list[Result] = []
    reference: list[np.ndarray] = []
    for variant in variants():
        with console.status(variant.name):
            trained = launch(
                _train,
                (variant.strategy, variant.communicator, epochs, examples),
                num_replicas=variant.processes,
                communicator=variant.communicator,
                strategy=None,
                timeout=_SECONDS_PER_VARIANT,
            )
        losses, speed, accuracy, weights = trained[0]
        reference = reference or weights
        pairs = [pair for *_, own in trained for pair in zip(own, reference, strict=True)]
        difference = max(float(np.max(np.abs(mine - theirs))) for mine, theirs in pairs)
        results.append(Result(variant.name, speed, accuracy, difference, losses))
    console.print(_table(results))
    if visible_gpus() < 2:
        console.print(_WHY_NOT_FASTER.format(cores=_cores(usable_cores())), soft_wrap=True, highlight=False)
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        hint = f"To get a picture of loss curves and throughput, {install_hint('plots')} && tfrep demo"
        console.print(hint, markup=False, soft_wrap=True)
    elif picture is not None:
        _draw(results, Path(picture))
        console.print(f"Loss curves and throughput: {picture}")
    console.print(f"{time.monotonic() - begun:.0f} s in all, most of them to start Python and TensorFlow.", highlight=False)
    return results


def _cores(count: int) -> str:
    return "the one core" if count == 1 else f"the same {count} cores"


def _train(
    strategy: str, communicator: str, epochs: int, examples: int | None
) -> tuple[list[float], float, float, list[np.ndarray]]:
    """Trains in a separate process. Returns losses, examples per second, the accuracy and the weights."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < 2:  # Two replicas need two devices of one kind.
        tf.config.set_visible_devices([], "GPU")
    scope: Any = contextlib.nullcontext()
    if strategy == "mirrored":
        scope = MirroredStrategy(["GPU:0", "GPU:1"] if len(gpus) > 1 else use_logical_cpus(2)).scope()
    elif strategy == "multi-worker":
        scope = MultiWorkerStrategy(communicator).scope()
    (images, labels), test = load_digits()
    images, labels = images[:examples], labels[:examples]
    keras.utils.set_random_seed(0)
    with scope:
        model = _network()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    seconds, losses = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        losses += model.fit(images, labels, batch_size=64, verbose=0).history["loss"]
        seconds.append(time.perf_counter() - start)
    _, accuracy = model.evaluate(*test, batch_size=len(test.labels), verbose=0)
    return losses, len(labels) / statistics.median(seconds[1:]), float(accuracy), model.get_weights()


def _network() -> keras.Model:
    # All layers are smooth. Any change of the order of a sum causes rounding errors of 1e-7. The kinks of ReLU and max pooling
    # would turn them into differences of 1e-2 within ten epochs.
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.Activation("gelu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dense(64, activation="gelu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="The same network on handwritten digits")
    table.add_column("variant")
    for heading in ("examples/s", "test accuracy", "largest weight difference"):
        table.add_column(heading, justify="right")
    for result in results:
        difference = "" if result.variant == ONE_DEVICE else f"{result.largest_difference:.1e}"
        table.add_row(result.variant, f"{result.examples_per_second:,.0f}", f"{result.accuracy:.1%}", difference)
    return table


def _draw(results: Sequence[Result], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    for i, result in enumerate(results):  # The first is the widest, so that all are visible.
        curves.plot(range(1, len(result.losses) + 1), result.losses, linewidth=2.0 * (len(results) - i), label=result.variant)
    curves.set(yscale="log", title="Loss: the curves coincide", xlabel="epoch", ylabel="loss")
    curves.legend()
    drawn = bars.barh([result.variant for result in results], [result.examples_per_second for result in results])
    bars.bar_label(drawn, fmt="{:,.0f}", padding=3)
    bars.margins(x=0.18)
    bars.set(title="Throughput", xlabel="examples per second")
    bars.invert_yaxis()
    figure.savefig(picture, format="png", dpi=120)
