"""Compares a communicator's own collectives with the defaults of the contract, bit by bit, on this machine's GPU if it has one.

`python tests/gpu/collectives_program.py mirrored|tf|horovod [DTYPE...]` prints a JSON object for each dtype. A GPU is cut in two,
or two processes share it. `NCCL_MULTI_RANK_GPU_ENABLE=1` has NCCL connect them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "communicators")]

import tensorflow as tf  # noqa: E402
from test_defaults import DTYPES, check, own_and_default  # noqa: E402

import tfrep_strategy as tfrep  # noqa: E402
from tfrep_strategy.contrib.gpu_report.programs import halves  # noqa: E402

_MEMORY_MIB = 4096


def main(place: str, dtypes: Sequence[str]) -> None:
    """Runs all collectives that have a default, eagerly and in a function."""
    for finding in mirrored(dtypes) if place == "mirrored" else processes(place, dtypes):
        print(json.dumps({"place": place, **finding}), flush=True)


def mirrored(dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Two replicas of one process."""
    strategy = tfrep.MirroredStrategy(halves(_MEMORY_MIB))

    def step(dtype: str) -> Any:
        return own_and_default(strategy.extended.communicator_of(tfrep.replica_id()), [dtype])

    def compare(dtype: str, run: Callable[..., Any]) -> str:
        found = run(strategy.run, step, args=(dtype,))
        for replica in range(2):
            check(tf.nest.map_structure(lambda v, r=replica: strategy.experimental_local_results(v)[r], found), 2, [dtype])
        return str(strategy.experimental_local_results(found[f"all_to_all {dtype}"][0])[0].device)

    yield from findings(dtypes, compare)


def processes(communicator: str, dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Two processes."""
    ranks = tfrep.launch(_on_rank, (communicator, dtypes), num_replicas=2, communicator=communicator, strategy=None, timeout=300)
    for rank, found in enumerate(ranks):
        yield from ({"rank": rank, **finding} for finding in found)


def _on_rank(communicator: str, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    strategy = tfrep.MultiWorkerStrategy(communicator)

    def compare(dtype: str, run: Callable[..., Any]) -> str:
        found = run(own_and_default, strategy.communicator, [dtype])
        check(found, 2, [dtype])
        return str(found[f"all_to_all {dtype}"][0].device)

    return list(findings(dtypes, compare))


def findings(dtypes: Sequence[str], compare: Callable[..., str]) -> Iterator[dict[str, Any]]:
    """Compares what is called eagerly, and what is traced. `compare` returns the device of a result."""
    for name, run in (("eager", _called), ("traced", _traced)):
        for dtype in dtypes:
            start, wrong, device = time.monotonic(), "", ""
            try:
                device = compare(dtype, run)
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[:500]}"
            seconds = round(time.monotonic() - start, 1)
            yield {"how": name, "dtype": dtype, "wrong": wrong, "device": device, "seconds": seconds}


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return tf.function(lambda: function(*args, **kwargs))()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or DTYPES)
