"""What the step of a GAN costs a rank, in a loop that was written for one device: `python -m benchmarks.own_loop`.

The net is that of the DCGAN tutorial, with batches of 256. What counts is the CPU time of a rank, since the ranks share the
cores of this machine. One device is measured with as many copies of itself beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.crews import Variant
from benchmarks.report import write_json
from benchmarks.turns import compare, turns_parser

# For CPU seconds of a rank: at most so many times what a step would cost it if it were divided evenly.
TARGETS = {2: 1.15, 4: 1.3}
# For those of the first call: at most so many times what one device takes.
FIRST_CALL = 1.5
_TRANSPORTS = ("tf", "shared_memory")


def copies(processes: int) -> str:
    """Returns the name of as many copies of one device."""
    return f"{processes} copies of one device"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints a table, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by number of processes.
    """
    parser = turns_parser("own_loop", __doc__, rounds=5)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--smaller", type=int, default=1, metavar="K", help="divide the widths of the net by this")
    chosen = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    path, chosen.json = chosen.json, None
    for processes in chosen.processes:
        reference = copies(processes)
        of_one = Variant(reference, {"communicator": None}, processes)
        ours = [Variant(f"ours, {processes} processes, {each}", {"communicator": each}, processes) for each in _TRANSPORTS]
        questions = {f"{processes} processes": chosen.steps, f"{processes} processes, first call": 0}
        goals = dict(zip(questions, (TARGETS.get(processes, 1.3) / processes, FIRST_CALL), strict=True))
        results |= compare(
            [of_one, *ours], "benchmarks.own_loop_worker",
            {name: {"steps": steps, "smaller": chosen.smaller} for name, steps in questions.items()}, chosen,
            targets={name: {(each.name, reference): goal for each in ours} for name, goal in goals.items()},
            title="CPU time of a rank and step, {name}", reference=reference,
        )  # fmt: skip
    if path:
        write_json(path, results)
    return results


if __name__ == "__main__":
    main()
