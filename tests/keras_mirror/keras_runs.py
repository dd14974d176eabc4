"""Runs Keras's own test files in the scope of a strategy, in processes of their own.

`python keras_runs.py VARIANT FILE...` prints what became of each test; a file is named as it is below `keras/src`.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from tfrep_strategy.cluster.identity import identities, inherited_environ

KERAS = Path(importlib.util.find_spec("keras").origin).parent / "src"  # type: ignore[union-attr, arg-type]
VARIANTS = ("mirrored", "tf", "horovod")
_FAREWELL_SECONDS = 5.0
_OPTIONS = ["-q", "--tb=short", "-p", "scope_plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(KERAS)]


class Outcome(NamedTuple):
    """What became of a test.

    Attributes:
        name: "passed", "skipped" or "failed"; on several ranks "failed" unless it is the same on all.
        why: What pytest reported, of each rank that has something to say.
    """

    name: str
    why: str


def run(
    variant: str, tests: Sequence[str], limit: float, first: int = 0, every: int = 1, without: Collection[str] = ()
) -> dict[str, Outcome]:
    """Runs tests of Keras.

    Args:
        variant: "one device", or one of `VARIANTS`: two replicas, on two logical CPUs or in two processes.
        tests: Files below `keras/src`, or single tests as pytest names them.
        limit: Seconds for all of it.
        first: The first test to run, of all in order.
        every: Which of those that follow: 1 for all, 2 for every other one.
        without: Tests that are left out.

    Returns:
        What became of each test, by pytest's name.

    Raises:
        TimeoutError: It took too long.
        RuntimeError: pytest could not run.
    """
    size = 2 if variant in ("tf", "horovod") else 1
    arguments = [str(KERAS / test) for test in tests] + [f"--deselect={test}" for test in without]
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + limit
    finished = False
    while not finished:
        with tempfile.TemporaryDirectory(prefix="tfrep-keras-") as name:
            folder = Path(name)
            finished = _run_once(variant, size, arguments, (first, every, len(outcomes)), folder, deadline)
            found = _outcomes(folder, size)
            if not (found or finished):
                raise RuntimeError("pytest could not run:\n" + _logs(folder))
            outcomes.update(found)
    return outcomes


def _run_once(
    variant: str, size: int, arguments: Sequence[str], which: tuple[int, int, int], folder: Path, deadline: float
) -> bool:
    """Runs some tests, `which` are `[first::every][skip:]` of all; returns whether the last one was reached."""
    first, every, skip = map(str, which)
    environ = inherited_environ() | {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        "TFREP_MIRROR_VARIANT": variant,
        "TFREP_MIRROR_SIZE": str(size),
        "TFREP_MIRROR_FIRST": first,
        "TFREP_MIRROR_EVERY": every,
        "TFREP_MIRROR_SKIP": skip,
        "TFREP_MIRROR_FOLDER": str(folder),
    }
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *arguments]
    with contextlib.ExitStack() as stack:
        who = stack.enter_context(identities(variant, size)) if size > 1 else [{}]
        processes = []
        for rank in range(size):
            log = stack.enter_context(open(folder / f"{rank}.log", "wb"))
            own = environ | who[rank] | {"TFREP_MIRROR_RANK": str(rank)}
            process = subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
            stack.callback(_end, process)
            processes.append(process)
        while all(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Keras's tests took too long ({variant}):\n{_logs(folder)}")
            time.sleep(0.1)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_FAREWELL_SECONDS)
    return all((folder / f"{rank}.finished").exists() for rank in range(size))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def _outcomes(folder: Path, size: int) -> dict[str, Outcome]:
    tests = {int(path.name.partition(".")[0]): path.read_text("utf-8") for path in folder.glob("*.begun")}
    outcomes = {}
    for number, test in sorted(tests.items()):
        names, reasons = set(), []
        for rank in range(size):
            ended = folder / f"{number}.{rank}.ended"
            name, why = json.loads(ended.read_text("utf-8")) if ended.exists() else ("failed", _last_words(folder, rank))
            names.add(name)
            reasons += [f"Rank {rank}: {name}. {why}"] if why else []
        outcomes[test] = Outcome(names.pop() if len(names) == 1 else "failed", "\n".join(reasons))
    return outcomes


def _last_words(folder: Path, rank: int) -> str:
    return "It did not end: " + (folder / f"{rank}.log").read_text("utf-8", "replace")[-4000:]


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text("utf-8", "replace")[-3000:] for path in sorted(folder.glob("*.log")))


if __name__ == "__main__":
    begun = time.monotonic()
    results = run(sys.argv[1], sys.argv[2:], limit=3600.0)
    for test, outcome in results.items():
        print(f"{outcome.name:8}{test}" + (f"\n{outcome.why}\n" if outcome.name == "failed" else ""))
    print(dict(collections.Counter(outcome.name for outcome in results.values())), f"{time.monotonic() - begun:.0f} s")
