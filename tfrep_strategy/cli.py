"""The command `tfrep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tfrep_strategy._version import __version__
from tfrep_strategy.errors import ConfigurationError, TfrepError, message

app = typer.Typer(
    name="tfrep",
    help="Unmodified Keras 3 on many devices and many machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
horovod_app = typer.Typer(help="Build Horovod for the installed TensorFlow, and see what it can do.", no_args_is_help=True)
app.add_typer(horovod_app, name="horovod")

_INTERRUPTED = 130
_BAD_INPUT = 2

_ON_PROCESSES = ("auto", "multi-worker")
_IN_STEP = (*_ON_PROCESSES, "mirrored")
_ON_SERVERS = ("parameter-server",)
_STRATEGIES_WITH = {
    "num_replicas": _IN_STEP, "communicator": _ON_PROCESSES, "hosts": _ON_PROCESSES, "export": _ON_PROCESSES,
    "prefix": _ON_PROCESSES, "bind_cores": _ON_PROCESSES,
    "nnodes": _ON_PROCESSES, "node_rank": _ON_PROCESSES, "rendezvous": _ON_PROCESSES,
    "backup_dir": _IN_STEP, "workers": _ON_SERVERS, "servers": _ON_SERVERS, "max_restarts": (*_IN_STEP, *_ON_SERVERS),
}  # fmt: skip
"""Which strategies an option of `tfrep run` is for."""


def main() -> None:
    """Runs the command line, and turns this package's errors into a message and an exit code.

    Example:
        >>> sys.argv = ["tfrep", "--version"]
        >>> with contextlib.suppress(SystemExit):
        ...     main()
        tfrep_strategy ...
    """
    try:
        app()
    except TfrepError as error:
        _print_error(error)
        sys.exit(_BAD_INPUT if isinstance(error, ConfigurationError) else 1)


def _print_error(error: Exception) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"tfrep: {error}", markup=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tfrep_strategy {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The script to run.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.")] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "-n", "--num-replicas", help="How many replicas; else all of --hosts, the tasks of srun, or the devices of one process."
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="auto, mirrored (one process), multi-worker (a process per replica), or parameter-server (SCRIPT"
            " coordinates --workers that update variables on --servers)."
        ),
    ] = "auto",
    communicator: Annotated[
        str, typer.Option(help="auto, horovod, tf, shared_memory (one machine), mpi (under mpirun) or an installed transport.")
    ] = "auto",
    hosts: Annotated[str | None, typer.Option(help="Machines to run on, through ssh: host1:4,host2:4.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --hosts: a variable that other machines get; repeatable."),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Start this command on as many machines, with -n for each. With MIN:MAX machines may come and go (--backup-dir).",
        ),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="With --nnodes: the number of this machine, from 0. MIN:MAX needs none.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --nnodes: where machine 0 listens, as the others reach it.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the output of other ranks than 0, of workers and servers; else a temporary one.")
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix", help="Show the output of all ranks, each line with its rank.")] = False,
    as_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
    workers: Annotated[int, typer.Option(help="parameter-server: how many workers.")] = 2,
    servers: Annotated[int, typer.Option(help="parameter-server: how many servers.")] = 1,
    max_restarts: Annotated[
        int, typer.Option(help="How often all is started again after a rank, a machine or a parameter server was lost.")
    ] = 0,
    backup_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder in which each fit is backed up, to go on from when the run is started again; with --max-restarts on one"
            " machine by default one beside the logs."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS",
            help="Trace these steps of the first fit on all ranks: FROM:TO, counted from 0 and without TO, or how many after the"
            " first five.",
        ),
    ] = None,
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for traces, as for tensorboard --logdir; else profile in --log-dir, or tfrep-profile in the current one."
        ),
    ] = None,
    bind_cores: Annotated[
        bool,
        typer.Option("--bind-cores", help="Bind each rank to its own part of the cores. Not beside other runs on the machine."),
    ] = False,
) -> None:
    """Run a Keras script, which need not know about strategies, on several replicas.

    Everything after SCRIPT belongs to the script.
    """
    from tfrep_strategy.running import Options, RunFailed, run_script
    from tfrep_strategy.running.nodes import Node
    from tfrep_strategy.running.runs import chosen_by_user

    own_arguments = arguments or []
    if own_arguments[:1] == ["--"]:
        del own_arguments[0]
    if not _is_given(context, "strategy"):
        strategy = chosen_by_user("TFREP_STRATEGY") or strategy
    if not _is_given(context, "communicator"):
        communicator = chosen_by_user("TFREP_COMMUNICATOR") or communicator
    profile = chosen_by_user("TFREP_PROFILE") if profile is None else profile
    backup_dir = chosen_by_user("TFREP_BACKUP_DIR") if backup_dir is None else backup_dir
    _check_options(context, strategy)
    if strategy == "parameter-server":
        from tfrep_strategy.running.coordinator import ClusterOptions, run_coordinator

        cluster = ClusterOptions(
            workers=workers, servers=servers, max_restarts=max_restarts, log_dir=log_dir, profile=profile, profile_dir=profile_dir
        )
        try:
            failure = run_coordinator(script, own_arguments, cluster, as_module=as_module)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        raise typer.Exit(0 if failure is None else failure.exit_code)
    node = Node.of(rank=node_rank, nnodes=nnodes, rendezvous=rendezvous)
    options = Options(
        num_replicas, strategy=strategy, communicator=communicator, hosts=hosts, export=tuple(export or ()),
        log_dir=log_dir, prefix=prefix, node=node, max_restarts=max_restarts, backup_dir=backup_dir,
        profile=profile, profile_dir=profile_dir, bind_cores=bind_cores,
    )  # fmt: skip
    try:
        run_script(script, own_arguments, options, as_module=as_module)
    except RunFailed as failed:
        sys.stdout.flush()
        _print_error(failed)
        raise typer.Exit(failed.failure.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_options(context: typer.Context, strategy: str) -> None:
    """Refuses a strategy that does not exist, and options that would mean nothing to it."""
    known = (*_IN_STEP, *_ON_SERVERS)
    if strategy not in known:
        raise ConfigurationError(message("Unknown strategy.", hint=f"use {', '.join(known)}.", strategy=strategy))
    for name, strategies in _STRATEGIES_WITH.items():
        if strategy not in strategies and _is_given(context, name):
            raise ConfigurationError(
                message(
                    f"This strategy has no --{name.replace('_', '-')}.",
                    hint=f"that is for --strategy {' or '.join(strategies)}.",
                    strategy=strategy,
                )
            )


@app.command(context_settings={"allow_interspersed_args": False})
def verify(
    script: Annotated[str, typer.Argument(help="The script to run.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.")] = None,
    num_replicas: Annotated[int, typer.Option("-n", "--num-replicas", help="How many replicas.")] = 2,
    strategy: Annotated[
        str, typer.Option(help="auto or multi-worker (a process per replica), or mirrored (one process).")
    ] = "auto",
    communicator: Annotated[str, typer.Option(help="How processes talk, as for tfrep run.")] = "auto",
    steps: Annotated[
        int, typer.Option(help="How many steps each epoch takes, and how many of each function are compared tensor by tensor.")
    ] = 3,
    full: Annotated[bool, typer.Option("--full", help="Let each epoch take all its steps. No more of them are compared.")] = False,
    as_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")] = False,
) -> None:
    """Compare a Keras script on several replicas with one device, and show the first tensor that differs.

    The script runs three times: with replicas, and twice on one device. Everything after SCRIPT belongs to the script.
    """
    from tfrep_strategy.running.verified_script import verify_script

    own_arguments = arguments or []
    if own_arguments[:1] == ["--"]:
        del own_arguments[0]
    if strategy not in _IN_STEP:
        raise ConfigurationError(message("Unknown strategy.", hint=f"use {', '.join(_IN_STEP)}.", strategy=strategy))
    try:
        verdict = verify_script(
            script, own_arguments, num_replicas=num_replicas, strategy=strategy, communicator=communicator, steps=steps, full=full,
            as_module=as_module,
        )  # fmt: skip
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    for line in verdict.lines:
        typer.echo(line)
    raise typer.Exit(verdict.exit_code)


@app.command("profile")
def profile_now(
    run_pid: Annotated[
        int, typer.Argument(metavar="PID", min=1, max=2**22, help="The process id of `tfrep run`.", show_default=False)
    ],
    seconds: Annotated[float, typer.Option(help="How long to trace, at most 60.")] = 2.0,
    profile_dir: Annotated[Path | None, typer.Option(help="Folder for the traces; else that of the run.")] = None,
) -> None:
    """Trace all ranks of a run that is running on this machine, at the same time, and show what they do."""
    from tfrep_strategy.cluster.profiles.requests import profile_run

    profile_run(run_pid, seconds, profile_dir)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    patches: Annotated[bool, typer.Option("--patches", help="List what is replaced in Keras and TensorFlow, and why.")] = False,
) -> None:
    """Show what is installed and what was detected, and test that processes can talk to each other."""
    from tfrep_strategy.cluster.startup_log import quiet_start
    from tfrep_strategy.core.limits import check_keras_backend

    check_keras_backend()
    if patches:
        with quiet_start():
            from tfrep_strategy.strategies.patches import show as show_patches
        show_patches(as_json)
        return
    from tfrep_strategy.contrib.doctor import examine, show

    if not show(examine(), as_json=as_json):
        raise typer.Exit(1)


@app.command()
def demo(
    picture: Annotated[Path, typer.Option(help="Where to write loss curves and throughput bars (PNG; needs matplotlib).")] = Path(
        "tfrep-demo.png"
    ),
) -> None:
    """Train a small network on handwritten digits in every way, and compare."""
    from tfrep_strategy.cluster.startup_log import quiet_start
    from tfrep_strategy.core.limits import check_keras_backend

    check_keras_backend()
    with quiet_start():
        from tfrep_strategy.contrib.demo import run_demo
    run_demo(picture)


@horovod_app.command()
def install(
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="nccl|mpi", help="Also build in NCCL or MPI; repeatable.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where built wheels are kept; else TFREP_CACHE_DIR, or the user's cache.")
    ] = None,
) -> None:
    """Build Horovod for the TensorFlow that is installed, or take the wheel of an earlier build, and install it."""
    from tfrep_strategy.cluster.horovod.build import build_wheel, install_wheel, status

    wheel = build_wheel(with_ or (), cache_dir)
    install_wheel(wheel)
    typer.echo(status().describe())


@horovod_app.command("status")
def show_status() -> None:
    """Say which Horovod is installed, and what is built in."""
    from tfrep_strategy.cluster.horovod.build import status

    found = status()
    typer.echo(found.describe())
    if found.problem:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
