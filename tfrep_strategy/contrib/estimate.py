"""`tfrep estimate`: how much memory a replica of a script's model needs, and what would make it fit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfrep_strategy.cluster.command import check_script, module_command
from tfrep_strategy.cluster.hardware import driver_gpus, gpus_are_visible
from tfrep_strategy.cluster.identity import inherited_environ
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.core.validation import MOST_RANKS
from tfrep_strategy.errors import ConfigurationError, TfrepError, check_count, message

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LEAST = 10**4
"""What takes fewer bytes has no line if most models have none of it."""
_ROWS = {
    "weights": "weights",
    "optimizer": "optimizer slots",
    "accumulators": "accumulated gradients",
    "gradients": "gradients",
    "others": "metrics, random state",
}


def bytes_of(text: str) -> int:
    """Reads a size of memory.

    Args:
        text: A number with a unit, such as "16GB" (10^9) or "16GiB" (2^30); bytes where there is none.

    Returns:
        The bytes.

    Raises:
        ConfigurationError: It is no such size.

    Example:
        >>> bytes_of("16GB"), bytes_of("1.5 GiB")
        (16000000000, 1610612736)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if not size:
        raise ConfigurationError(message("This is not a size of memory.", hint="write it as 16GB or 16GiB.", memory=text))
    return size


def memory_of_gpus() -> int | None:
    """Returns the bytes of the smallest GPU that programs may see; None if there is none."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = driver_gpus() if gpus_are_visible() else []
    chosen = [gpu for gpu in gpus if str(gpu.index) in shown] or gpus
    return min((gpu.total_bytes for gpu in chosen), default=None)


def estimate(
    target: str, arguments: Sequence[str], *, replicas: int, memory: int | None = None, as_module: bool = False
) -> dict[str, Any]:
    """Runs a script until its first training step is traced, on the CPU, and finds what each replica would need.

    Args:
        target: Path of the script, or name of the module.
        arguments: What follows it in `sys.argv`.
        replicas: How many replicas share the work.
        memory: How many bytes each of them has; None if that is not known.
        as_module: Whether `target` is a module, as for `python -m`.

    Returns:
        The numbers, in bytes, as `--json` prints them.

    Raises:
        ConfigurationError: There is no such script, a number cannot be used, the script has traced no step, it shards weights
            and has one replica, or its mesh has several replicas along both axes.
        TfrepError: The script has failed before.

    Example:
        >>> estimate("train.py", [], replicas=0)
        Traceback (most recent call last):
        ...
        tfrep_strategy.errors.ConfigurationError: A run has at least one replica. Received: replicas=0
        Hint: use a whole number, from 1 to 100000.
    """
    check_count("A run has at least one replica.", 1, MOST_RANKS, replicas=replicas)
    kind = "module" if as_module else "script"
    check_script(kind, target)
    with tempfile.TemporaryDirectory(prefix="tfrep-estimate-") as folder:
        path = Path(folder, "needs.json")
        given = [str(replicas), "" if memory is None else str(memory), str(path), kind, target, *arguments]
        command = module_command(__name__, *given)
        environ = inherited_environ() | {"CUDA_VISIBLE_DEVICES": "-1", "TFREP_QUIET": "1"}
        # What the script prints is not the answer.
        done = subprocess.run(command, env=environ, stdout=sys.stderr.fileno(), check=False)
        found = json.loads(path.read_text("utf-8")) if path.exists() else None
    if found and 1 < found.get("of_model", 1) < replicas:
        hint = "estimate it on a mesh with one replica along an axis."
        raise ConfigurationError(
            message("Meshes with several replicas along both axes are not estimated.", hint, replicas=replicas)
        )
    if found and "shards_weights" in found:
        raise ConfigurationError(
            message("The script shards weights, of which one replica has all.", hint="use --replicas 2 or more.", replicas=replicas)
        )
    if found:
        return dict(found)
    if done.returncode:
        hint = "run the script with python, and correct the error above."
        raise TfrepError(message("The script failed before its first training step.", hint, exit_code=done.returncode))
    if found is None:
        hint = "it has to call fit, or a tf.function that trains. A step that it gives to strategy.run is not estimated."
        raise ConfigurationError(message("The script ended without a training step that replicas share.", hint, script=target))
    hint = "give the function its batches as arguments, or make them of one size (drop_remainder=True)."
    raise ConfigurationError(message("The step reads batches of a size that is not known.", hint, script=target))


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs the script, in a separate process.

    Args:
        arguments: Number of replicas, bytes of memory or an empty string, path of the file to write, "script" or "module", its
            name, and its arguments.
        own_path: The search path with which Python started.
    """
    replicas, memory, result, *program = arguments
    with quiet_start():
        from tfrep_strategy.contrib.estimated_script import run
    run(int(replicas), int(memory) if memory else None, Path(result), program, own_path)


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that tell what was found.

    Args:
        found: From `estimate`.
    """
    shared = f"{found['examples_of_replica']} of {found['batch_size']} examples"
    yield f"Each of {found['replicas']} replicas has {shared} in a step ({found['line']})."
    exact, bound = found["exact"], found["upper_bound"]
    for name, told in _ROWS.items():
        if exact[name] >= _LEAST or name not in ("accumulators", "others"):
            yield _row(told, exact[name], "exact")
    yield _row("activations and temporaries", bound["activations"], "upper bound")
    yield _row("total", bound["total"], "upper bound")
    if found["tensors_of_guessed_size"]:
        yield f"{found['tensors_of_guessed_size']} tensors have sizes that the data decide. They count as what they are made of."
    memory = found["memory"]
    if memory is None:
        return
    if found["fits"]:
        yield f"That fits into {_told(memory)}."
        return
    if found["fits"] is False:
        yield f"Without activations it is more than {_told(memory)} already. What other settings need, about:"
    else:
        yield f"That may be more than {_told(memory)}. What other settings need, about:"
    for change in found["changes"]:
        settings = [f"{name}={change[name]}" for name in _SETTINGS if name in change]
        yield f"{_row(', '.join(settings), change['total'], 'fits' if change['fits'] else 'does not fit')}"


_SETTINGS = ("batch_size", "gradient_accumulation_steps", "shard_optimizer_state")


def _row(what: str, size: int, note: str) -> str:
    return f"  {what:<48} {_told(size):>12}  {note}"


def _told(size: int) -> str:
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{size / unit:,.2f} {name}"
