"""Measures several variants in turns."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.progress import Progress

from benchmarks.crews import Crew, Variant
from benchmarks.report import show, summarize, write_json


def turns_parser(name: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Makes the parser of a benchmark's command line, with what all of them take.

    Args:
        name: Of the benchmark's module.
        description: What it measures.
        rounds: How often each variant gets its turn by default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each variant gets its turn")
    parser.add_argument("--json", metavar="PATH", help="also write all samples there")
    return parser


def take_turns(
    variants: Sequence[Variant],
    module: str,
    workloads: Mapping[str, Mapping[str, Any]],
    rounds: int,
    more_rounds: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Starts every variant once, then asks them one after the other, round after round.

    Args:
        variants: What to compare.
        module: What their processes run.
        workloads: Questions, by name.
        rounds: How many answers of each are kept; one more is asked for to warm up.
        more_rounds: By workload and variant, how many are kept of those that need more.

    Yields:
        For each workload its name and, by variant, the answers: seconds.
    """
    # What ends the benchmark from outside must not leave stopped processes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack, Progress(transient=True) as progress:
        kept = {
            name: {v.name: max(rounds, (more_rounds or {}).get(name, {}).get(v.name, 0)) for v in variants} for name in workloads
        }
        turns = sum(count + 1 for of_variants in kept.values() for count in of_variants.values())
        task = progress.add_task("", total=len(variants) + turns)
        crews = []
        for variant in variants:
            progress.update(task, description=f"starting {variant.name}")
            crews.append(stack.enter_context(contextlib.closing(Crew(variant, module))))
            progress.advance(task)
        for name, question in workloads.items():
            samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
            for round_number in range(max(kept[name].values(), default=-1) + 1):
                # Back and forth, so that none always has its turn after the same one.
                for crew in crews if round_number % 2 else reversed(crews):
                    if round_number > kept[name][crew.variant.name]:
                        continue
                    progress.update(task, description=f"{name}: {crew.variant.name}")
                    seconds = crew.ask(dict(question))
                    if round_number:
                        samples[crew.variant.name].append(seconds)
                    progress.advance(task)
            yield name, samples


def compare(
    variants: Sequence[Variant],
    module: str,
    workloads: Mapping[str, Mapping[str, Any]],
    chosen: argparse.Namespace,
    *,
    targets: Mapping[str, Mapping[tuple[str, str], float]],
    title: str,
    reference: str,
    more_rounds: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Measures variants in turns, prints a table for each workload, and writes JSON if asked to.

    Args:
        variants: What to compare.
        module: What their processes run.
        workloads: Questions, by name. The throughput of one with a `batch` is shown, too.
        chosen: The command line that `turns_parser` has read.
        targets: For each workload the largest ratios that are wanted; see `summarize`.
        title: Of a table, with `{name}` for the workload.
        reference: Variant with which the others are compared.
        more_rounds: See `take_turns`.

    Returns:
        What is written as JSON, by workload.
    """
    results = {}
    for name, samples in take_turns(variants, module, workloads, chosen.rounds, more_rounds):
        results[name] = summarize(samples, targets[name])
        show(title.format(name=name), results[name], reference, workloads[name].get("batch"))
    if chosen.json:
        write_json(chosen.json, results)
    return results
