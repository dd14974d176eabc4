"""What a process finds out about the TensorFlow that it has imported. `tfrep doctor` asks a fork, and need not import it itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfrep_strategy.environments import detect_environment
from tfrep_strategy.nvidia import Gpu, driver_gpus, gpus_are_visible, pairs_without_peer_access
from tfrep_strategy.startup_log import quiet_start


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: The checked item.
        value: The result.
        ok: Whether the result is good; None if it is neither good nor bad.
    """

    name: str
    value: str
    ok: bool | None = None


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs the process that is asked from start to end.

    Args:
        arguments: The file for its findings.
        own_path: Unused: it imports what the doctor could import.
    """
    del own_path
    Path(arguments[0]).write_text(json.dumps([asdict(finding) for finding in about_tensorflow()]), "utf-8")


def about_tensorflow() -> list[Finding]:
    """Returns what there is to say about TensorFlow, Keras and the GPUs. It imports them.

    Example:
        >>> [finding.name for finding in about_tensorflow()][:2]
        ['TensorFlow', 'Keras']
    """
    with quiet_start():
        return [tried("TensorFlow", _tensorflow), tried("Keras", _keras), *_gpus(driver_gpus())]


def sum_of_ranks() -> float:
    """Sums rank + 1 over the ranks. It runs on every rank."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()

    def step() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(detect_environment().rank + 1.0))

    return float(strategy.experimental_local_results(strategy.run(step))[0])


def tried(name: str, find: Callable[[], str]) -> Finding:
    """Returns what a function finds; a bad finding if it raises.

    Args:
        name: The checked item.
        find: The function.

    Example:
        >>> tried("TensorFlow", lambda: tf.__version__).ok
        True
    """
    try:
        return Finding(name, find(), ok=True)
    except Exception as error:  # A doctor reports every illness, whatever it is.
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)


def _tensorflow() -> str:
    import tensorflow as tf

    return f"{tf.__version__}, {'built with CUDA' if tf.test.is_built_with_cuda() else 'built without CUDA'}"


def _keras() -> str:
    import keras

    return f"{keras.__version__}, backend {keras.backend.backend()}"


def _gpus(there: list[Gpu]) -> list[Finding]:
    """Lists the GPUs, whether TensorFlow can use them, and how."""
    if not there:
        return [Finding("GPUs", "none"), Finding("XLA", _xla(False))]
    import tensorflow as tf

    seen = len(tf.config.get_visible_devices("GPU"))
    hidden = not gpus_are_visible()
    used = f"TensorFlow sees {seen}" + (f", CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}" if hidden else "")
    if not (seen or hidden):
        used += "; hint: pip install 'tensorflow[and-cuda]', or name the folders of CUDA's libraries in LD_LIBRARY_PATH"
    apart = pairs_without_peer_access()
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return [
        *(Finding(f"GPU {gpu.index}", gpu.describe().partition(": ")[2]) for gpu in there),
        Finding("GPUs", used, ok=bool(seen or hidden)),
        Finding("A process per GPU", _processes(seen)),
        Finding("Peer access", f"not between {', '.join(map(str, apart))}" if apart else "between all GPUs"),
        Finding("TF32", "on: float32 products have 10 bits" if tf32 else "off"),
        Finding("XLA", _xla(bool(seen))),
    ]


def _processes(num_gpus: int) -> str:
    from tfrep_strategy.devices import own_gpu

    ranks = ", ".join(f"rank {i} takes GPU {own_gpu(num_gpus, i, num_gpus) or 0}" for i in range(num_gpus))
    return f"`tfrep run -n {num_gpus}`: {ranks}" if num_gpus else "none"


def _xla(on_gpus: bool) -> str:
    return f'jit_compile="auto" is {"on where the model allows it" if on_gpus else "off: TensorFlow sees no GPU"}'
