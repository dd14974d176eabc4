"""Makes the report: one process after the other measures a part of it, until the time is over."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tfrep_strategy._version import __version__
from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.hardware import driver_cuda, driver_gpus, find_nccl, gpus_are_visible
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.running.joining import refuse_inside_a_run

SECONDS = 840.0
"""After so many seconds no part goes on. What has ended counts."""
_SECONDS_OF_PART = 400.0
_LINES_OF_A_FAILURE = 30
_TO_END = 20.0
"""How long a part may take to end its processes when its time is over."""


def report(kind: str = "GPU", seconds: float = SECONDS) -> dict[str, Any]:
    """Compares replicas on all GPUs of this machine with one device, and measures how fast they are.

    Args:
        kind: "GPU"; or "CPU", which tries the report itself on two logical CPUs.
        seconds: How long it may take.

    Returns:
        The report, which can be written as JSON.

    Raises:
        ConfigurationError: There is no such device, or this process is in a run.
    """
    if kind not in ("GPU", "CPU"):
        raise ConfigurationError(message("No such kind of devices.", hint="use GPU or CPU.", devices=kind))
    gpus = [gpu.name for gpu in driver_gpus()] if kind == "GPU" and gpus_are_visible() else []
    if kind == "GPU" and not gpus:
        hint = "run it on a machine with NVIDIA's driver. `--devices CPU` tries the report itself on two logical CPUs."
        raise ConfigurationError(message("There is no GPU here that programs may use.", hint=hint))
    refuse_inside_a_run("`tfrep doctor --gpus`")
    begin = time.monotonic()
    findings: list[dict[str, Any]] = []
    scaling: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for part, replicas in _parts(len(gpus)):
        left = seconds - (time.monotonic() - begin) - _TO_END
        found, problem = _measured(part, replicas, kind, min(left, _SECONDS_OF_PART)) if left > 0 else ([], "no time was left")
        took = round(time.monotonic() - begin)
        print(f"{took:4} s: {part}, {replicas} replicas: {problem or 'done'}", file=sys.stderr, flush=True)
        if problem:
            left_out.append({"part": part, "replicas": replicas, "why": problem})
        over = ", NCCL" if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else ""
        place = f"{part}, {replicas} {'replicas' if len(gpus) != 1 else 'replicas on a GPU'}{over}"
        (scaling if part.startswith("speed") else findings).extend(
            found if part.startswith("speed") else [{"place": place, **each} for each in found]
        )
    return {
        "schema": 1,
        "version": __version__,
        "devices": kind,
        "machine": {**_machine(), "gpus": gpus},
        "seconds": round(time.monotonic() - begin),
        "findings": findings,
        "scaling": scaling,
        "left_out": left_out,
    }


def _parts(gpus: int) -> Iterator[tuple[str, int]]:
    """Yields what is measured, and by how many replicas: what tells most comes first."""
    most = max(gpus, 2)
    yield from (("one process", most), ("processes", most), ("speed: plain Keras", 1))
    counts = [most] if gpus < 2 else [most, 1, *(most >> i for i in range(1, most.bit_length()) if most >> i > 1)]
    for count in counts:
        yield from ((f"speed: {kind}", count) for kind in ("processes", "one process"))
    yield "deterministic operations", most


def _measured(part: str, replicas: int, kind: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a part, and returns what it has found, and why it has not ended well; an empty string if it has."""
    environ = inherited_environ() | ({"CUDA_VISIBLE_DEVICES": "-1"} if kind == "CPU" else {})
    command = module_command(__name__, part, str(replicas), kind)
    begin = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        timer = threading.Timer(seconds, _end, [process])
        timer.start()
        try:
            assert process.stdout is not None
            found = [json.loads(line) for line in process.stdout if line.startswith("{")]
            code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
        log.seek(0)
        last = log.readlines()[-_LINES_OF_A_FAILURE:]
    if not code:
        return found, ""
    sys.stderr.writelines(last)
    return found, f"it took more than {seconds:.0f} s" if time.monotonic() - begin >= seconds else f"it ended with code {code}"


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Measures a part in this process, and prints each finding, a JSON object a line, when it is there.

    Args:
        arguments: The name of the part, the number of replicas, and "GPU" or "CPU".
        own_path: The search path with which Python started.
    """
    part, replicas, kind = arguments
    with quiet_start():
        from tfrep_strategy.contrib.gpu_report.measured import measured
    for finding in measured(part, int(replicas), kind):
        print(json.dumps(finding), flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a part, which ends its ranks."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TO_END / 2)
    process.kill()


def _machine() -> dict[str, Any]:
    nccl = find_nccl()
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras")},
        "cores": os.cpu_count(),
        "cuda_of_driver": driver_cuda(),
        "nccl": nccl.version if nccl else None,
    }


def show(found: Mapping[str, Any]) -> None:
    """Prints a report as tables.

    Args:
        found: From `report`.
    """
    where = ", ".join(found["machine"]["gpus"]) or "logical CPUs"
    table = Table("replicas", "check", "expected", "found", "", title=f"Equal to one device, on {where}")
    for each in found["findings"]:
        table.add_row(each["place"], each["check"], each["expected"], each["found"], "ok" if each["ok"] else "NOT ok")
    speed = Table("replicas are", "replicas", "examples/s", "of as many devices", title="Speed")
    for each in found["scaling"]:
        part = efficiency(found, each)
        shown = "" if part is None else f"{part:.0%}"
        speed.add_row(each["kind"], str(each["replicas"]), f"{each['examples_per_second']:,.0f}", shown)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(speed)
    for each in found["left_out"]:
        console.print(f"Left out: {each['part']}, {each['replicas']} replicas: {each['why']}.")


def efficiency(found: Mapping[str, Any], line: Mapping[str, Any]) -> float | None:
    """Compares replicas with as many times plain Keras on one device.

    Args:
        found: A report.
        line: One of its lines about speed.

    Returns:
        The quotient of their speeds; None if that of plain Keras was not measured.

    Example:
        >>> lines = [
        ...     {"kind": "plain Keras", "replicas": 1, "examples_per_second": 100.0},
        ...     {"kind": "processes", "replicas": 4, "examples_per_second": 360.0},
        ... ]
        >>> efficiency({"scaling": lines}, lines[1])
        0.9
    """
    plain = next((each for each in found["scaling"] if each["kind"] == "plain Keras"), None)
    return None if plain is None else line["examples_per_second"] / (line["replicas"] * plain["examples_per_second"])


def write_report(kind: str, path: Path, *, as_json: bool = False) -> bool:
    """Makes a report, writes it to a file, and prints it.

    Args:
        kind: As for `report`.
        path: The file.
        as_json: Whether to print it as JSON instead of tables.

    Returns:
        Whether all replicas were equal to one device, and no part of it was left out.

    Raises:
        ConfigurationError: There is no such device, this process is in a run, or there is no folder for the file.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(message("There is no folder for the report.", hint="name a file in one.", report=str(path)))
    found = report(kind)
    path.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if as_json:
        print(json.dumps(found))
    else:
        show(found)
        print(f"Written to {path}. An issue with this file gives others the figures: see docs/gpus.md.")
    return all(each["ok"] for each in found["findings"]) and not found["left_out"]
