"""`tfrep verify`: runs a script with replicas and on one device, a few steps of each function, and says where they part first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfrep_strategy.cluster.command import check_script
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.core.limits import check_keras_backend
from tfrep_strategy.errors import check_count

_SAFETY = 16.0
"""How much further replicas may part from one device than one device from itself, with weights that are changed in their last bit.
Each step rounds many more numbers than its weights."""
_OF_COUNTS = 0.1
"""Which part of a number may differ that no last bit has moved, where others were: it counts decisions, as an accuracy does, and a
few of these are close. Steps are compared more closely, and so are the metrics in them."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        exit_code: 0 if nothing differs, 1 if something does, 2 if there is nothing to compare, or that of a run that has failed.
        lines: What to tell.
    """

    exit_code: int
    lines: Sequence[str]


def verify_script(
    target: str,
    arguments: Sequence[str],
    *,
    num_replicas: int = 2,
    strategy: str = "auto",
    communicator: str = "auto",
    steps: int = 3,
    full: bool = False,
    as_module: bool = False,
) -> Verdict:
    """Runs a script with replicas, then twice on one device: as it is, and with weights that are changed in their last bit.

    Args:
        target: Path of the script, or name of the module.
        arguments: What follows it in `sys.argv`.
        num_replicas: How many replicas are compared with one device.
        strategy: As for `tfrep run`.
        communicator: As for `tfrep run`.
        steps: How many steps each epoch takes, and how many of each function are compared.
        full: Whether each epoch takes all its steps, of which no more are compared.
        as_module: Whether `target` is a module, as for `python -m`.

    Raises:
        ConfigurationError: There is no such script, a number cannot be used, or Keras would be loaded with another backend.

    Example:
        >>> verify_script("train.py", [], steps=0)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: Nothing would be compared. Received: steps=0
        Hint: use a whole number, 1 or more.
    """
    check_keras_backend()
    check_count("Nothing would be compared.", 1, steps=steps)
    check_count("One replica is one device.", 2, num_replicas=num_replicas)
    check_script("module" if as_module else "script", target)
    program = ["-m", target, *arguments] if as_module else [os.path.abspath(target), *arguments]
    of_replicas = ["-n", str(num_replicas), "--strategy", strategy, "--communicator", communicator]
    if strategy == "mirrored":
        of_replicas = of_replicas[:4]
    with tempfile.TemporaryDirectory(prefix="tfrep-verify-") as folder:

        def run(name: str, options: Sequence[str], **more: str) -> int:
            own = Path(folder, name)
            own.mkdir()
            more |= {"TFREP_VERIFY_DIR": str(own), "TFREP_VERIFY_STEPS": str(steps), "TFREP_VERIFY_FULL": str(int(full))}
            environ = {"PYTHONHASHSEED": "0"} | inherited_environ() | more
            command = [sys.executable, "-m", "tfrep_strategy.cli", "run", "--quiet", *options, *program]
            output = None if name == "replicas" else subprocess.DEVNULL
            with _fresh_folder() as here:
                return subprocess.run(command, env=environ, cwd=here, stdout=output, check=False).returncode

        code = run("replicas", of_replicas)
        files = sorted(Path(folder, "replicas").glob("told*.json"), key=os.path.getmtime)
        told = [json.loads(file.read_text("utf-8")) for file in files]
        for each in told:
            if each["finding"] is not None:
                return Verdict(1, _lines_of(each["finding"], each["run"], "replica" if strategy == "mirrored" else "rank"))
        compared = _sum_up(told)
        if code:
            hint = [] if full else [f"Each epoch has ended after {steps} steps. A script that needs all of them takes --full."]
            return Verdict(code, ["The run with replicas has failed. Until then no step differs from one device.", compared, *hint])
        if not told and not any(Path(folder, "replicas").iterdir()):
            how = "Put the step of a loop of your own into a function with tfrep.partition."
            return Verdict(2, ["Nothing was compared: the script calls no fit, evaluate, predict, or partitioned function.", how])
        for name, more in {"one": {}, "nudged": {"TFREP_VERIFY_NUDGE": "1"}}.items():
            if code := run(name, ["-n", "1"], TFREP_VERIFY_STANDS_FOR=str(num_replicas), **more):
                return Verdict(code, ["The run on one device has failed.", compared])
        if any(each["draws"] for each in told):
            beside = "Results are not compared: steps draw numbers without a seed, which are others in each run."
            return Verdict(0, ["No step differs from one device.", compared, beside])
        found = _first_result_that_differs(*(_results(Path(folder, name)) for name in ("replicas", "one", "nudged")))
    if isinstance(found, _Alike):
        shortened = [] if full else [f"Epochs ended after {steps} steps, if they had more. With --full they take all."]
        return Verdict(0, ["Nothing differs from one device.", compared, *found.lines(), *shortened])
    return Verdict(1, [*found, compared])


@dataclasses.dataclass
class _Alike:
    """Results that do not differ: of how many calls, and the one that came closest to its tolerance."""

    calls: int
    closest: str = ""
    difference: float = 0.0
    tolerance: float = math.inf

    def add(self, what: str, difference: float, tolerance: float) -> None:
        if difference and difference / tolerance > self.difference / self.tolerance:
            self.closest, self.difference, self.tolerance = what, difference, tolerance

    def lines(self) -> list[str]:
        lines = [f"Results and weights of {self.calls} calls were compared."]
        if self.closest:
            lines.append(
                f"The largest difference: {self.difference:.3g}, of {self.closest}; the tolerance is {self.tolerance:.3g}."
            )
        elif self.calls:
            lines.append("All are the same to the last bit.")
        return lines


@contextlib.contextmanager
def _fresh_folder() -> Iterator[str]:
    """Yields a folder with links to what the current one has: each run begins as the first does. What it writes there is removed.

    It is beside the current one if it can be, so that `../data` is what it was.
    """
    here = Path.cwd()
    beside = here.parent if os.access(here.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".tfrep-verify-", dir=beside) as folder:
        for entry in here.iterdir():
            Path(folder, entry.name).symlink_to(entry)
        yield folder


def _sum_up(told: Sequence[Any]) -> str:
    functions = len({each["step"] for each in told})
    most = max((each["compared"] for each in told), default=0)
    alone = [each["alone"] for each in told if each["alone"]]
    lines = [f"Compared: {len(told)} steps of {functions} functions, up to {most} tensors in each."]
    if alone:
        lines.append(f"In {len(alone)} of them one device went on with its own results, not with those of replicas: {alone[0]}")
    return "\n".join(lines)


def _lines_of(finding: Any, run: int, who: str) -> list[str]:
    of = f"all {who}s together" if finding["replica"] is None else f"{who} {finding['replica']}"
    layer, line = finding["layer"] or "none", finding["line"] or "none"
    return [
        f"The first that differs from one device: {finding['what']}, in step {run} of its function.",
        f"  layer:      {layer}",
        f"  line:       {line}",
        f"  placement:  {finding['placement']}",
        f"  {who}:{' ' * (11 - len(who))}{of}",
        f"  difference: {finding['difference']}",
        f"  tolerance:  {finding['tolerance']:.3g}",
    ]


def _results(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    return [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("result*.pkl"))]


def _first_result_that_differs(replicas: Sequence[Any], one: Sequence[Any], nudged: Sequence[Any]) -> list[str] | _Alike:
    """Returns what to tell of the first result that differs; if none does, what was compared."""
    calls = [[call for call, _ in each] for each in (replicas, one)]
    if calls[0] != calls[1]:
        return ["Calls differ from those on one device.", f"  replicas:   {calls[0]}", f"  one device: {calls[1]}"]
    alike = _Alike(len(replicas))
    for number, ((call, found), (_, right)) in enumerate(zip(replicas, one, strict=True), 1):
        other = nudged[number - 1][1] if number <= len(nudged) else {}  # Last bits may decide how many calls there are.
        shared = {name for name in other if name in right and np.shape(other[name][0]) == np.shape(right[name][0])}
        has_spread = any(np.any(other[name][0] != right[name][0]) for name in shared)
        of = f"{{}} of call {number}, {call}"
        first = f"The first that differs from one device: {of}"
        for name in [*found, *(each for each in right if each not in found)]:
            if name not in found or name not in right or np.shape(found[name][0]) != np.shape(right[name][0]):
                return [f"{first.format(name)}: only one has it, or its shape differs."]
            (got, last_bit), (wanted, _) = found[name], right[name]
            spread = _distance(other[name][0], wanted) if name in shared else math.inf
            largest = float(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)))
            tolerance, difference = _SAFETY * (spread + last_bit * largest), _distance(got, wanted)
            if has_spread and not spread:
                tolerance = max(tolerance, _OF_COUNTS * largest)
            if not difference <= tolerance:
                return [
                    f"{first.format(name)}.",
                    f"  difference: {difference:.3g}",
                    f"  tolerance:  {tolerance:.3g}",
                    "No step differs that was compared. So it is the data, a metric, a callback, or what is done between steps.",
                ]
            alike.add(of.format(name), difference, tolerance)
    return alike


def _distance(own: np.ndarray, right: np.ndarray) -> float:
    """Returns the largest difference; infinity where one is finite and the other is not."""
    with np.errstate(all="ignore"):
        same = (own == right) | (np.isnan(own) & np.isnan(right))
        return float(np.max(np.nan_to_num(np.where(same, 0.0, np.abs(own - right)), nan=np.inf), initial=0.0))
