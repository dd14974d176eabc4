"""Memory and step time of a rank whose weights are sharded: `tfrep run -n N -m benchmarks.sharded_weights`.

Prints what each rank takes beyond what it has taken before the model is made: after that, and at most in steps. glibc returns
freed memory at once with `MALLOC_MMAP_THRESHOLD_=262144`. With `--turns` it prints the step time of whole weights, of sharded
state and of sharded weights instead, whose models train in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

_SHARDS: dict[str, dict[str, Any]] = {
    "none": {},
    "state": {"shard_optimizer_state": True},
    "weights": {"shard_optimizer_state": True, "shard_weights": True},
}
_BATCH, _STEPS = 16, 3


def _megabytes(name: str) -> float:
    """Returns a line of the status of this process, such as VmRSS, in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) / 1024


def _made(strategy: Any, chosen: argparse.Namespace) -> Any:
    """Makes a model of equal layers with Adam in the scope of a strategy."""
    import keras

    with strategy.scope():
        layers = [keras.layers.Dense(chosen.width, use_bias=False) for _ in range(chosen.layers)]
        model = keras.Sequential([keras.Input((chosen.width,)), *layers])
        model.compile(keras.optimizers.Adam(1e-6), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def _seconds(model: Any, x: Any) -> float:
    """Returns the seconds of a step."""
    start = time.perf_counter()
    model.fit(x, x, batch_size=_BATCH, epochs=_STEPS, verbose=0)
    return (time.perf_counter() - start) / _STEPS


def _in_turns(chosen: argparse.Namespace, x: Any) -> None:
    """Trains a model of each kind in turns, and prints the median time of a step, and its ratio to that of whole weights."""
    import tfrep_strategy as tfrep

    models = {}
    for name, settings in _SHARDS.items():
        strategy = tfrep.MultiWorkerStrategy(bucket_bytes=4 << 20, **settings)
        models[name] = _made(strategy, chosen)
        _seconds(models[name], x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(chosen.turns):
        for name, model in models.items():
            times[name].append(_seconds(model, x))
    for name, each in times.items() if strategy.rank == 0 else ():
        ratio = statistics.median(a / b for a, b in zip(each, times["none"], strict=True))
        told = f"median {statistics.median(each):.3f} s a step ({min(each):.3f} to {max(each):.3f}), {ratio:.2f} of none"
        print(f"sharded: {name}, {strategy.num_replicas_in_sync} ranks, {chosen.turns} turns: {told}", flush=True)


def main() -> None:
    """Makes models, trains them, and prints lines."""
    parser = argparse.ArgumentParser("python -m benchmarks.sharded_weights", description=__doc__)
    parser.add_argument("--shard", choices=_SHARDS, default="weights", help="what is sharded")
    parser.add_argument("--layers", type=int, default=16, help="how many layers")
    parser.add_argument("--width", type=int, default=2048, help="a layer has width x width weights")
    parser.add_argument("--turns", type=int, default=0, help="how often a model of each kind trains in turn; 0 measures memory")
    chosen = parser.parse_args()
    import keras
    import numpy as np

    import tfrep_strategy as tfrep

    x = np.ones((_BATCH, chosen.width), "float32")
    if chosen.turns:
        _in_turns(chosen, x)
        return
    strategy = tfrep.MultiWorkerStrategy(bucket_bytes=4 << 20, **_SHARDS[chosen.shard])
    with strategy.scope():
        keras.utils.set_random_seed(1)
        small = keras.Sequential([keras.layers.Dense(8)])
        small.compile("adam", "mse")
        small.fit(x, x[:, :8], batch_size=_BATCH, verbose=0)
    before = _megabytes("VmRSS")
    model = _made(strategy, chosen)
    made = _megabytes("VmRSS") - before
    model.fit(x, x, batch_size=_BATCH, verbose=0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # Forgets the peak until now.
    seconds = _seconds(model, x)
    weights = chosen.layers * chosen.width**2 * 4 / (1 << 20)
    print(
        f"sharded: {chosen.shard}, rank {strategy.rank} of {strategy.num_replicas_in_sync}: weights {weights:.0f} MB, model made"
        f" {made:.0f} MB, peak in steps {_megabytes('VmHWM') - before:.0f} MB, {seconds:.2f} s a step",
        flush=True,
    )


if __name__ == "__main__":
    main()
