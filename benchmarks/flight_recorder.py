"""What the flight recorder costs: `python -m benchmarks.flight_recorder [--communicator NAME] [--json FILE]`.

Two processes do tiny steps. In each round some steps run with the recorder and some without it. The result is the median over the
rounds of the ratio of their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import tfrep_strategy as tfrep


def measured(rounds: int, steps: int) -> dict[str, float]:
    """Measures in one process of a run, as all others do at the same time.

    Args:
        rounds: Number of rounds, each with and without the recorder.
        steps: Number of steps in each half of a round.
    """
    import tensorflow as tf

    from tfrep_strategy.cluster.flight_recorder import RECORDER
    from tfrep_strategy.core.calls import Call

    strategy = tf.distribute.get_strategy()
    enter, leave = RECORDER.enter, RECORDER.leave
    entry = enter((), Call("none", "", (), ""))
    leave(entry)

    def switch(is_on: bool) -> None:
        RECORDER.enter = enter if is_on else lambda group, call: entry  # type: ignore[method-assign]
        RECORDER.leave = leave if is_on else lambda entry: None  # type: ignore[method-assign]

    @tf.function
    def in_function() -> tf.Tensor:
        return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))

    def eager() -> tf.Tensor:
        return strategy.run(lambda: tfrep.all_reduce(tf.ones([3])))

    results = {}
    for name, step in (("function", in_function), ("eager", eager)):
        ratios, withouts = [], []
        for number in range(-1, rounds):
            medians = {}
            for is_on in (True, False) if number % 2 else (False, True):
                switch(is_on)
                times = []
                for _ in range(steps):
                    began = time.perf_counter()
                    step()
                    times.append(time.perf_counter() - began)
                medians[is_on] = statistics.median(times)
            if number >= 0:  # The first round warms up.
                ratios.append(medians[True] / medians[False])
                withouts.append(medians[False])
        low, median, high = statistics.quantiles(ratios, n=4)
        results |= {name: median, f"{name}, quarter": low, f"{name}, three quarters": high}
        results[f"{name}, us"] = 1e6 * statistics.median(withouts)
    return {name: round(value, 4) for name, value in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--communicator", default="shared_memory")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run = tfrep.launch(measured, (options.rounds, options.steps), num_replicas=2, communicator=options.communicator)
    print(json.dumps(run[0], indent=1))
    if options.json:
        options.json.write_text(json.dumps(run[0]), "utf-8")


if __name__ == "__main__":
    main()
