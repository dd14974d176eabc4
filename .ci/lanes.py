"""Runs the lanes of tests: the short one first, then the others while there is time. Ends with a table of all lanes.

`.ci/run` calls it. A run fails if a lane fails, or if the short one does not pass, which has the quick tests too. The run for a
release has no limit of time. It leaves out lanes that have passed on its commit before, and fails if a lane does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tfrep_strategy.cluster.horovod.build import cache_folder

SHORT = "quick, short"
REQUIRED_MINUTES = 45
"""The short lane should have ended by then."""

PYTEST = ("pytest", "-p", "no:cacheprovider")
HOROVOD = ("tfrep", "horovod", "install")
GREEN = ("passed", "passed before")


@dataclass(frozen=True)
class Outcome:
    """How a lane has ended.

    Attributes:
        state: What the table says.
        passed: How many tests passed.
        failed: How many failed.
        skipped: How many were skipped.
        minutes: How long it took.
    """

    state: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0


def command(lane: str) -> list[str]:
    """Returns the command that runs a lane.

    Args:
        lane: The lane.
    """
    if lane == SHORT:
        return [*PYTEST, "--durations=40", "--rooms"]
    if lane.startswith("versions_"):
        return ["env", "TFREP_HOROVOD_TESTS=none", "nox", "-s", lane.removeprefix("versions_"), "--", "-x"]
    return [*PYTEST, "-x", "-m", lane]


def run(lane: str, limit: int) -> Outcome:
    """Runs a lane.

    Args:
        lane: The lane.
        limit: The seconds after which it is interrupted, so that its tests can end the processes that they have started.
    """
    print(f"\nLane {lane}: {' '.join(command(lane))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        limited = ["timeout", "--signal=INT", "--kill-after=60", str(limit), *command(lane), f"--junitxml={report}"]
        began = time.monotonic()
        with subprocess.Popen(limited, stdin=subprocess.DEVNULL) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)  # `timeout` hands it on.
                process.wait()
                raise
        seconds = time.monotonic() - began
        passed, failed, skipped = counts(report)
    if code == 0:
        state = "passed" if passed else "skipped"  # Nox writes no report where its Python is missing.
    else:
        state = "timed out" if seconds >= limit and not failed else "failed"
    return Outcome(state, passed, failed, skipped, seconds / 60)


def run_with_mpi(lane: str, limit: int) -> Outcome:
    """Runs a lane with a Horovod that has MPI. All other lanes are for Horovod without it.

    Args:
        lane: The lane.
        limit: As of `run`.
    """
    subprocess.run([*HOROVOD, "--with", "mpi"], stdin=subprocess.DEVNULL, check=True)
    outcome = run(lane, limit)
    subprocess.run(HOROVOD, stdin=subprocess.DEVNULL, check=True)
    return outcome


def counts(report: Path) -> tuple[int, int, int]:
    """Reads how many tests have passed, failed and were skipped; zeros if pytest could not write its report.

    Args:
        report: The report.
    """
    try:
        (suite,) = ElementTree.parse(report).getroot()
    except (OSError, ElementTree.ParseError):
        return 0, 0, 0
    tests, errors, failures, skipped = (int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped"))
    return tests - errors - failures - skipped, errors + failures, skipped


def in_order(lanes: Sequence[str], commit: str) -> list[str]:
    """Returns the lanes, starting with another one on each commit.

    Args:
        lanes: The lanes.
        commit: The commit.
    """
    first = zlib.crc32(commit.encode()) % len(lanes)
    return [*lanes[first:], *lanes[:first]]


def read_passes(file: Path) -> dict[str, str]:
    """Reads at which commit each lane has last passed.

    Args:
        file: The file, which may be missing or broken.
    """
    try:
        return {str(lane): str(commit) for lane, commit in json.loads(file.read_text("utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def record(file: Path, lane: str, commit: str, passed: bool) -> None:
    """Records how a lane has ended, and keeps what another run has recorded of others.

    Args:
        file: The file.
        lane: The lane.
        commit: The commit.
        passed: Whether it has passed. If not, it has no longer passed on this commit.
    """
    passes = read_passes(file)
    if passed:
        passes[lane] = commit
    elif passes.get(lane) == commit:
        del passes[lane]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(passes, indent=1), "utf-8")
        new.replace(file)
    except OSError as error:
        print(f"Lane {lane}: its outcome cannot be recorded. {error}")


def table(outcomes: dict[str, Outcome], passes: dict[str, str]) -> str:
    """Returns the table of all lanes.

    Args:
        outcomes: How they have ended.
        passes: At which commit each has last passed.
    """
    line = "{:20}  {:13}  {:>6}  {:>6}  {:>7}  {:>7}  {}".format
    lines = [line("Lane", "This run", "Passed", "Failed", "Skipped", "Minutes", "Last passed at")]
    for lane, ended in outcomes.items():
        numbers = (ended.passed, ended.failed, ended.skipped, f"{ended.minutes:.1f}") if ended.minutes else ("",) * 4
        lines.append(line(lane, ended.state, *numbers, passes.get(lane, "unknown")[:12]))
    return "\n".join(lines)


def lacking(outcomes: dict[str, Outcome], required: Collection[str]) -> list[str]:
    """Returns the lanes for which a run fails.

    Args:
        outcomes: How all lanes have ended.
        required: Those that must pass. The others must only not fail.
    """
    return [lane for lane, ended in outcomes.items() if ended.state == "failed" or (lane in required and ended.state not in GREEN)]


def main() -> int:
    """Runs the lanes of the project in this folder.

    Returns:
        0 if they are as they must be, else 1.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", help="the commit that is tested")
    parser.add_argument("--changed", action="store_true", help="files differ from the commit: nothing is recorded")
    parser.add_argument("--release", action="store_true", help="every lane must pass on the commit")
    parser.add_argument("--minutes", type=float, default=70, help="for all lanes")
    parser.add_argument("--lane-minutes", type=float, default=10, help="for each lane but the short one")
    parser.add_argument("--spent", type=float, default=0, help="seconds of --minutes that are over")
    options = parser.parse_args()

    minutes, lane_minutes = (float("inf"), 60) if options.release else (options.minutes, options.lane_minutes)
    end = time.monotonic() + 60 * minutes - options.spent
    file = cache_folder() / "lanes.json"
    lanes = runpy.run_path("tests/lanes.py")["parts"]()
    outcomes = dict.fromkeys([SHORT, *lanes], Outcome("not reached"))

    for lane in [SHORT, *in_order(lanes, options.commit)]:
        if options.release and lane != SHORT and read_passes(file).get(lane) == options.commit:
            outcomes[lane] = Outcome("passed before")
            continue
        left = end - time.monotonic()
        limit = max(1, int(min(left, 7200) if lane == SHORT else 60 * lane_minutes))
        if lane != SHORT and left < limit:
            continue
        run_lane = run_with_mpi if lane == "engines" and os.environ.get("TFREP_CI_APT") == "1" else run
        outcomes[lane] = run_lane(lane, limit)
        if outcomes[lane].state in ("passed", "failed") and not options.changed:
            record(file, lane, options.commit, passed=outcomes[lane].state == "passed")

    print("", table(outcomes, read_passes(file)), "", sep="\n")
    if options.changed:
        print("Files differ from the commit, so this run is not recorded.")
    spent = options.spent / 60 + outcomes[SHORT].minutes
    if spent > REQUIRED_MINUTES:
        print(f"The short lane has ended after {spent:.0f} minutes. It should after {REQUIRED_MINUTES}.")
    bad = lacking(outcomes, outcomes if options.release else [SHORT])
    for lane in bad:
        print(f"Lane {lane}: {outcomes[lane].state}. To repeat it: {' '.join(command(lane))}")
    passed, failed = sum(ended.passed for ended in outcomes.values()), sum(max(outcomes[lane].failed, 1) for lane in bad)
    print(f"{passed} passed, {failed} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
