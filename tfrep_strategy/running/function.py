"""Runs a Python function on several replicas, from a notebook or a script.

Pickles functions by value, and lets them keep the file and the lines that they were written in.
Two things need those in the process where a function arrives: AutoGraph, which reads a function's source to convert
its loops, and tracebacks. cloudpickle 3.1.3 replaces the file of every function that it pickles by value, and the cells
of a notebook are no files at all.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import tempfile
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from tfrep_strategy.cluster.command import module_command
from tfrep_strategy.cluster.environments import detect_environment
from tfrep_strategy.cluster.profiles.requests import answer_requests, name_of_folder
from tfrep_strategy.cluster.signs_of_life import give_signs
from tfrep_strategy.cluster.startup_log import quiet_start
from tfrep_strategy.errors import PeerError, message
from tfrep_strategy.running.joining import warn_inside_a_run
from tfrep_strategy.running.logs import RunFailed
from tfrep_strategy.running.notes import noted_failure
from tfrep_strategy.running.ranks import deferred_signals
from tfrep_strategy.running.runs import Options, chosen_by_user, run_to_end
from tfrep_strategy.running.scope import run_strategy_scope


def dumps(value: Any) -> bytes:
    """Pickles a value for another process of this machine, as `cloudpickle.dumps` does, with the sources of functions.

    Args:
        value: Anything that cloudpickle can pickle.

    Returns:
        What `pickle.loads` reads.

    Raises:
        TypeError: The value cannot be pickled.

    Example:
        >>> import pickle
        >>> pickle.loads(dumps(lambda: 1)).__code__.co_filename == (lambda: 1).__code__.co_filename
        True
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduced(code: CodeType) -> tuple[Any, ...]:
    build, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)[:2]
    name = code.co_filename
    lines = None if os.path.exists(name) else linecache.getlines(name)
    return _with_source, (build, parts, name, lines)


def _with_source(build: Callable[..., CodeType], parts: tuple[Any, ...], name: str, lines: list[str] | None) -> CodeType:
    if lines:
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # Without a time, it is never looked up again.
    return build(*parts).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    num_replicas: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    communicator: str = "auto",
    strategy: str | None = "multi-worker",
    timeout: float | None = None,
) -> list[Any]:
    """Calls a function on every replica, in new processes on this machine, inside the scope of their strategy.

    The function and its arguments travel by value, so it may be defined in a notebook. `tf.distribute.get_strategy()`
    inside it is the strategy of the run.

    Args:
        fn: What to call.
        args: Its positional arguments.
        num_replicas: How many replicas take part.
        kwargs: The function's keyword arguments.
        communicator: "horovod", "tf", "mpi", "shared_memory", or "auto": shared memory, unless there are GPUs.
        strategy: "multi-worker": one process per replica; "mirrored": one process with all replicas; `None`: one
            process per replica that has to make its own strategy.
        timeout: Seconds after which the run is stopped; by default it may take for ever.

    Returns:
        What the function returned, by rank; a single item for "mirrored".

    Raises:
        ConfigurationError: An argument cannot be used.
        PeerError: The function raised on a rank, a rank died, or the time was over. All processes are gone by then.

    Example:
        >>> launch(lambda: tf.distribute.get_strategy().num_replicas_in_sync, num_replicas=2)
        [2, 2]
    """
    warn_inside_a_run("`tfrep.launch`")
    if communicator == "auto":
        communicator = chosen_by_user("TFREP_COMMUNICATOR") or communicator
    options = Options(num_replicas, strategy=strategy, communicator=communicator, timeout=timeout)
    return results(dumps((fn, tuple(args), dict(kwargs or {}))), options)


def results(call: bytes, options: Options) -> list[Any]:
    """Calls a function on every replica.

    Args:
        call: The function, its positional and its keyword arguments, pickled.
        options: What kind of run is wanted.

    Returns:
        As `launch`.

    Raises:
        ConfigurationError: The options cannot be used on this machine.
        PeerError: As `launch`.

    Example:
        >>> results(dumps((lambda: 1, (), {})), Options(num_replicas=2, strategy=None))
        [1, 1]
    """
    with deferred_signals() as events, tempfile.TemporaryDirectory(prefix=name_of_folder()) as name:
        folder = Path(name)
        (folder / "call").write_bytes(call)
        arguments = module_command(__name__, name, "" if options.strategy is None else "scope")
        try:
            run_to_end(options, arguments, folder, events)
        except RunFailed as failed:
            story, traceback = str(failed), failed.failure.traceback
            if traceback:
                story = f"Rank {failed.failure.rank} raised, and all ranks were ended.\n{traceback}Logs: {failed.log_dir}"
            raise PeerError(story) from None
        left = [rank for rank in range(options.processes) if not _result(folder, rank).exists()]
        if left:
            what = f"Ranks {left} ended before the function returned, without an error."
            raise PeerError(message(what, hint="let it return, and not end its process (sys.exit, absl.app.run).", ranks=left))
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(options.processes)]


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs a rank from start to end.

    Args:
        arguments: Folder of the call and its results; "scope" if the strategy's scope is to be entered.
        own_path: Unused: the function may need what its caller could import.
    """
    del own_path
    folder, scope = Path(arguments[0]), arguments[1]
    rank = detect_environment().rank
    give_signs(folder, rank)
    with noted_failure(folder, rank):
        with quiet_start():  # A function that names a module of Keras's or TensorFlow's imports it as it arrives.
            fn, args, kwargs = pickle.loads((folder / "call").read_bytes())
        if scope:
            with run_strategy_scope():
                answer_requests(folder, f"rank{rank}")
                result = fn(*args, **kwargs)
        else:
            result = fn(*args, **kwargs)
        _result(folder, rank).write_bytes(dumps(result))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.result"
