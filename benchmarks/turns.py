"""Measures several variants in turns."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.crews import Crew, Variant


def take_turns(
    variants: Sequence[Variant], module: str, workloads: Mapping[str, Mapping[str, Any]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Starts every variant once, then asks them one after the other, round after round.

    Args:
        variants: What to compare.
        module: What their processes run.
        workloads: Questions, by name.
        rounds: How many answers of each are kept; one more is asked for to warm up.

    Returns:
        By workload and by variant, the answers: seconds.
    """
    # What ends the benchmark from outside must not leave stopped processes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    samples: dict[str, dict[str, list[float]]] = {name: {v.name: [] for v in variants} for name in workloads}
    with contextlib.ExitStack() as stack, Progress(transient=True) as progress:
        task = progress.add_task("", total=len(variants) * (1 + len(workloads) * (rounds + 1)))
        crews = []
        for variant in variants:
            progress.update(task, description=f"starting {variant.name}")
            crews.append(stack.enter_context(contextlib.closing(Crew(variant, module))))
            progress.advance(task)
        for name, question in workloads.items():
            for round_number in range(rounds + 1):
                for crew in crews:
                    progress.update(task, description=f"{name}: {crew.variant.name}")
                    seconds = crew.ask(dict(question))
                    if round_number:
                        samples[name][crew.variant.name].append(seconds)
                    progress.advance(task)
    return samples
