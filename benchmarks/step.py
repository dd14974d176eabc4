"""What a training step costs: `python -m benchmarks.step`.

Every variant trains the same net by `fit` on the same global batch, in processes of its own that live for the
whole run, and they take turns, round after round. Replicas on CPUs share the cores that one device has for itself, so
that a second one makes nothing faster: the numbers compare what strategies cost.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.crews import Variant
from benchmarks.turns import compare, turns_parser
from tfrep_strategy.cluster.hardware import usable_cores
from tfrep_strategy.cluster.identity import horovod_is_installed

REFERENCE = "Keras"
ALONE = "2 processes, each alone (Keras)"
"""What two processes could do at best: each trains on its part of the batches, and never talks."""

IN_STEP = "2 processes, alone in step (Keras)"
"""The same, but at the end of each step they wait for each other, as all must that train one model in step."""

BOUND = ", bound"
"""Of variants whose processes are bound to cores of their own, as by `tfrep run --bind-cores`."""

# Filters of convolutions, and widths of dense layers; 0.003, 0.6, 5.1, 0.06 and 0.1 million parameters.
NETS: dict[str, dict[str, Any]] = {
    "tiny": {"widths": [32, 64, 10], "batch": 64, "steps": 200},
    "10 ms": {"widths": [512, 640, 384, 10], "batch": 256, "steps": 40},
    "5 million": {"widths": [1024, 1536, 1536, 768, 10], "batch": 256, "steps": 8},
    "convolutions": {"widths": [784, 10], "filters": [32, 64, 64], "batch": 256, "steps": 64},
    "batch normalization": {"widths": [784, 10], "filters": [32, *[24] * 12], "normalized": True, "batch": 128, "steps": 8},
}

_IN_MEMORY = "ours, 2 processes, shared_memory"

OWN_STATISTICS = ", own"
"""Of variants in which each replica normalizes its rows by their own statistics: `batch_statistics="replica"`. They are measured
where a net with batch normalization is."""

BEFORE = ", before"
"""Of variants that import the package of another commit."""

_WITH_STATISTICS = ("ours, mirrored", _IN_MEMORY, "ours, 2 processes, tf")
_BOUND = (ALONE, IN_STEP, _IN_MEMORY)

_XLA = {
    ("ours, 1 replica (mirrored), XLA", "Keras, XLA"): 1.05,
    ("ours, 1 replica (multi-worker), XLA", "Keras, XLA"): 1.05,
}

_ONE = {
    ("ours, 1 replica (mirrored)", REFERENCE): 1.02,
    ("ours, 1 replica (multi-worker)", REFERENCE): 1.02,
}

# A ratio so close to 1 is read off short rounds of the tiny net, where Python and dispatch dominate.
_ROUNDS_OF_ONE = 40

_PROCESSES = {
    (f"ours, 2 processes, {communicator}", peer): target
    for communicator in ("horovod", "tf", "shared_memory")
    for peer, target in (("stock multi-worker (tf_keras)", 1 / 1.5), ("Horovod (tf_keras)", 1 / 1.1))
}

TARGETS = {
    "tiny": {**_ONE, **_PROCESSES, ("ours, mirrored", "stock mirrored"): 0.5},
    "10 ms": {**_ONE, ("ours, mirrored", "stock mirrored"): 1.0},
    "5 million": {**_ONE, **_XLA, **_PROCESSES, ("ours, mirrored", "stock mirrored"): 1.0},
    "convolutions": {
        **_ONE,
        **_XLA,
        ("ours, mirrored", "stock mirrored"): 1.0,
        ("ours, 2 processes, horovod", "Horovod (tf_keras)"): 1.0,
        ("ours, 2 processes, tf", "Horovod (tf_keras)"): 1.0,
        (_IN_MEMORY, "Horovod (tf_keras)"): 1.0,
        (_IN_MEMORY, ALONE): 1 / 0.95,
        (_IN_MEMORY, IN_STEP): 1 / 0.95,
        (_IN_MEMORY + BOUND, ALONE): 1 / 0.95,
        (_IN_MEMORY + BOUND, ALONE + BOUND): 1 / 0.95,
        (_IN_MEMORY + BOUND, IN_STEP + BOUND): 1 / 0.95,
    },
    "batch normalization": {(each + OWN_STATISTICS, each): 1.0 for each in _WITH_STATISTICS},
}


def variants() -> list[Variant]:
    """Lists what can be measured here: peers that are not installed are left out.

    Returns:
        The variants.
    """
    # Stock replicas in one process may wait for each other for ever without threads of their own; ours see to it.
    threads = {"TF_NUM_INTEROP_THREADS": "16"}
    legacy = {"TF_USE_LEGACY_KERAS": "1"}
    found = [
        Variant(REFERENCE, {"strategy": "none", "jit_compile": False}),
        Variant("Keras, XLA", {"strategy": "none", "jit_compile": True}),
        Variant("ours, 1 replica (mirrored)", {"strategy": "ours, 1 mirrored", "jit_compile": False}),
        Variant("ours, 1 replica (multi-worker)", {"strategy": "ours, auto", "jit_compile": False}),
        Variant("ours, 1 replica (mirrored), XLA", {"strategy": "ours, 1 mirrored", "jit_compile": True}),
        Variant("ours, 1 replica (multi-worker), XLA", {"strategy": "ours, auto", "jit_compile": True}),
        Variant("stock mirrored", {"strategy": "stock mirrored", "jit_compile": False}, environ=threads),
        Variant("ours, mirrored", {"strategy": "ours, mirrored", "jit_compile": False}),
    ]
    alone = {"strategy": "none", "jit_compile": False, "own_part_of": 2}
    found += [Variant(ALONE, alone, 2), Variant(IN_STEP, {**alone, "in_step": True}, 2)]
    if horovod_is_installed():
        settings = {"strategy": "ours, horovod", "jit_compile": False}
        found.append(Variant("ours, 2 processes, horovod", settings, 2, "horovod"))
    for communicator in ("tf", "shared_memory"):
        settings = {"strategy": f"ours, {communicator}", "jit_compile": False}
        found.append(Variant(f"ours, 2 processes, {communicator}", settings, 2))
    found += [
        replace(each, name=each.name + OWN_STATISTICS, settings={**each.settings, "batch_statistics": "replica"})
        for each in found
        if each.name in _WITH_STATISTICS
    ]
    if usable_cores() >= 2:
        found += [replace(each, name=each.name + BOUND, bound=True) for each in found if each.name in _BOUND]
    if importlib.util.find_spec("tf_keras"):
        settings = {"strategy": "stock multi-worker", "jit_compile": False, "legacy_keras": True}
        found.append(Variant("stock multi-worker (tf_keras)", settings, 2, environ=legacy))
        if horovod_is_installed():
            settings = {"strategy": "horovod", "jit_compile": False, "legacy_keras": True, "own_part_of": 2}
            found.append(Variant("Horovod (tf_keras)", settings, 2, "horovod", legacy))
    return found


def beside(checkout: Path, variants: Sequence[Variant]) -> tuple[list[Variant], dict[tuple[str, str], float]]:
    """Puts those of an older commit beside ours, where batch normalization took a replica's own statistics by default.

    Args:
        checkout: Of the other commit.
        variants: What is measured of this one.

    Returns:
        Both, and what a step may cost at most, compared with the other commit.
    """
    both, targets = [], {}
    for each in variants:
        both.append(each)
        if each.name.startswith("ours"):
            settings = {key: value for key, value in each.settings.items() if key != "batch_statistics"}
            settings["synchronized"] = "batch_statistics" not in each.settings
            both.append(replace(each, name=each.name + BEFORE, settings=settings, checkout=checkout))
            targets[each.name, both[-1].name] = 1.03
    return both, targets


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by net.
    """
    parser = turns_parser("step", __doc__, rounds=9)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS), metavar="NET", help=str(list(NETS)))
    parser.add_argument("--steps", type=int, help="steps of one turn; by default about half a second")
    parser.add_argument("--variants", nargs="+", metavar="TEXT", help="measure only those whose name contains one of these")
    parser.add_argument("--pairs", type=int, default=_ROUNDS_OF_ONE, help="turns of plain Keras and of one replica on the tiny net")
    parser.add_argument("--before", type=Path, metavar="PATH", help="a checkout of another commit, measured beside this one")
    chosen = parser.parse_args(arguments)
    wanted = [v for v in variants() if not chosen.variants or any(text in v.name for text in chosen.variants)]
    if not any(NETS[name].get("normalized") for name in chosen.nets):
        wanted = [v for v in wanted if not v.name.endswith(OWN_STATISTICS)]
    targets: dict[str, Any] = {name: dict(TARGETS[name]) for name in chosen.nets}
    if chosen.before:
        wanted, more_targets = beside(chosen.before, wanted)
        targets = {name: {**each, **more_targets} for name, each in targets.items()}
    nets = {name: {**NETS[name], "name": name, "steps": chosen.steps or NETS[name]["steps"]} for name in chosen.nets}
    title = "A step of the net '{name}'"
    return compare(
        wanted, "benchmarks.step_worker", nets, chosen, targets=targets, title=title, reference=REFERENCE,
        more_rounds={"tiny": {name: chosen.pairs for pair in _ONE for name in pair}},
    )  # fmt: skip


if __name__ == "__main__":
    main()
