"""The command `tfrep`."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tfrep_strategy._version import __version__
from tfrep_strategy.errors import ConfigurationError, TfrepError, message

_OF_OTHER_LAUNCHERS = {
    **dict.fromkeys(("-np", "--np", "--num-proc", "--num-processes", "--nproc-per-node", "--ntasks"), "-n"),
    **dict.fromkeys(("-H", "--host"), "--hosts"),
    **dict.fromkeys(("--rdzv-endpoint", "--master-addr"), "--rendezvous"),
}
"""How mpirun, horovodrun, torchrun, accelerate and srun spell what an option of `tfrep run` does."""


class _Group(TyperGroup):
    """Commands. A flag takes no value, and the help names no type for it."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0].endswith(".py"):
            what, hint = f"`{ctx.command_path}` has no command {args[0]}.", f"`tfrep run {shlex.join(args)}` runs a script."
            raise ConfigurationError(message(what, hint=hint, command=args[0]))
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command, see `_Group`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = _without_type(super().get_help_option(ctx))
        if option is not None and self.params:  # Else it would stand alone in a panel, before all others.
            option.rich_help_panel = getattr(self.params[-1], "rich_help_panel", None)
        return option


class _CommandOfScript(_Command):
    """A command that runs a script. It tells options of the command from those of the script, and says which number is none."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [each.strip("{}") for each in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            raise self._explained(error, given) from None
        except Exception as error:
            unknown = getattr(error, "option_name", None)
            if unknown is None or any(unknown in param.opts for param in self.params):
                raise
            raise self._no_such_option(unknown, given) from None

    def _explained(self, error: typer.BadParameter, given: Sequence[str]) -> Exception:
        param = error.param
        if param is None:
            return error
        if param.name == "script":
            hint = f"name it behind the options: `tfrep {self.name} -n 2 train.py`; `tfrep {self.name} --help` has more examples."
            return ConfigurationError(message("No script is named.", hint=hint, arguments=list(given)))
        option, value = _written(param.opts, given)
        hint = f"write {option} 2."
        if option == "-n" and value == "p":
            hint = f"write -n 2; -np is an option of mpirun. `tfrep {self.name} --help` lists those of this command."
        return ConfigurationError(message(f"{option} takes a whole number.", hint=hint, **{str(param.name): value}))

    def _no_such_option(self, unknown: str, given: Sequence[str]) -> ConfigurationError:
        what, command = f"`tfrep {self.name}` has no option {unknown}.", f"tfrep {self.name}"
        dashed = unknown.replace("_", "-")
        own = [name for param in self.params for name in param.opts if name.startswith("-")]
        alike = difflib.get_close_matches(dashed, own, n=1, cutoff=0.8)
        place = next(i for i, each in enumerate(given) if each.split("=")[0] == unknown or each.startswith(unknown))
        if dashed in _OF_OTHER_LAUNCHERS and _OF_OTHER_LAUNCHERS[dashed] in own:
            hint = f"use {_OF_OTHER_LAUNCHERS[dashed]}; `{command} --help` lists all options."
        elif alike:
            hint = f"did you mean {alike[0]}? Options of the script stand behind the script."
        else:
            script = next((i for i in range(place, len(given)) if given[i].endswith(".py") or os.path.isfile(given[i])), None)
            if script is None:
                written = [*given[:place], "SCRIPT", *given[place:]]
            else:
                written = [*given[:place], given[script], *given[place:script], *given[script + 1 :]]
            hint = f"options of the script stand behind it: `{command} {shlex.join(written)}`. `{command} --help` lists the others."
        return ConfigurationError(message(what, hint=hint, option=unknown))


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


def _written(names: Sequence[str], given: Sequence[str]) -> tuple[str, str]:
    """Returns how a command line names an option last, and the value that it gives to it."""
    for i in reversed(range(len(given))):
        for name in names:
            value = given[i].removeprefix(name)
            if given[i] == name and i + 1 < len(given):
                return name, given[i + 1]
            if value != given[i] and (value.startswith("=") or not name.startswith("--")):
                return name, value.lstrip("=")
    return names[0], ""


app = typer.Typer(
    cls=_Group,
    name="tfrep",
    help="Distributed training for unmodified Keras 3, with results that match single-device training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
horovod_app = typer.Typer(
    cls=_Group, help="Build Horovod for the installed TensorFlow, and see what it can do.", no_args_is_help=True
)
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
        bool, typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


_Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run.", hidden=True, show_default=False)]
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.", hidden=True)]
_WHERE, _LAUNCHERS, _SERVERS = "Where", "Launchers: one on each machine", "Parameter servers"
_FAULTS, _PROFILE, _OUTPUT = "Faults", "Profile", "Script and output"
_EXAMPLES = """\
Examples:

tfrep run -n 2 train.py --epochs 3

tfrep run --hosts host1:4,host2:4 train.py

tfrep run -n 4 --max-restarts 3 --backup-dir backups train.py
"""


@app.command(cls=_CommandOfScript, context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
def run(
    context: typer.Context,
    script: _Script,
    arguments: _Arguments = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-replicas",
            metavar="N",
            rich_help_panel=_WHERE,
            help="How many replicas. Default: all of --hosts, the tasks of srun, or all GPUs of this machine; one on CPUs.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_WHERE,
            help="auto, mirrored (one process), multi-worker (a process per replica), or parameter-server (SCRIPT"
            " coordinates --workers that update variables on --servers).",
        ),
    ] = "auto",
    communicator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_WHERE,
            help="How processes communicate: auto, horovod, tf, shared_memory (one machine), mpi (under mpirun) or an installed"
            " transport.",
        ),
    ] = "auto",
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOST:N,...", rich_help_panel=_WHERE, help="Machines to run on, through ssh: host1:4,host2:4."),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", rich_help_panel=_WHERE, help="With --hosts: a variable that other machines get; repeatable."),
    ] = None,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores",
            metavar="",
            rich_help_panel=_WHERE,
            help="Bind each rank to its own part of the cores. Do not use it while other runs share the machine.",
        ),
    ] = False,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            rich_help_panel=_LAUNCHERS,
            help="Start this command on as many machines, with -n for each. With MIN:MAX machines may come and go (--backup-dir).",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_LAUNCHERS,
            help="With --nnodes: the number of this machine, from 0. With MIN:MAX it is not needed.",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_LAUNCHERS,
            help="With --nnodes: where machine 0 listens, as the others reach it.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", rich_help_panel=_SERVERS, help="parameter-server: how many workers.")] = 2,
    servers: Annotated[int, typer.Option(metavar="N", rich_help_panel=_SERVERS, help="parameter-server: how many servers.")] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            rich_help_panel=_FAULTS,
            help="How often the run is started again after a rank, a machine or a parameter server was lost.",
        ),
    ] = 0,
    backup_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=_FAULTS,
            help="Folder for backups of each fit, from which it resumes when the run is started again. Default with --max-restarts"
            " on one machine: a folder beside the logs.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS",
            rich_help_panel=_PROFILE,
            help="Trace these steps of the first fit on all ranks: FROM:TO, counted from 0 and without TO, or how many after the"
            " first five.",
        ),
    ] = None,
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=_PROFILE,
            help="Folder for traces, as for tensorboard --logdir. Default: profile in --log-dir, or tfrep-profile in the current"
            " folder.",
        ),
    ] = None,
    as_module: Annotated[
        bool,
        typer.Option("-m", "--module", metavar="", rich_help_panel=_OUTPUT, help="SCRIPT is a module, as for python -m."),
    ] = False,
    prefix: Annotated[
        bool,
        typer.Option(
            "--prefix", metavar="", rich_help_panel=_OUTPUT, help="Show the output of all ranks, each line with its rank."
        ),
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=_OUTPUT,
            help="Folder for the output of other ranks than 0, of workers and servers. Default: a temporary one.",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            metavar="",
            rich_help_panel=_OUTPUT,
            help="Do not say at the start what runs where, and at the end how fast it was. So does TFREP_QUIET=1.",
        ),
    ] = False,
) -> None:
    """Run a Keras script, which need not know about strategies, on several replicas.

    Everything after SCRIPT belongs to the script.
    """
    from tfrep_strategy.core.limits import is_quiet
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
    speaks = not (quiet or is_quiet())
    if strategy == "parameter-server":
        from tfrep_strategy.running.coordinator import ClusterOptions, run_coordinator

        cluster = ClusterOptions(
            workers=workers, servers=servers, max_restarts=max_restarts, log_dir=log_dir, profile=profile, profile_dir=profile_dir,
            speaks=speaks,
        )  # fmt: skip
        try:
            failure = run_coordinator(script, own_arguments, cluster, as_module=as_module)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        raise typer.Exit(0 if failure is None else failure.exit_code)
    node = Node.of(rank=node_rank, nnodes=nnodes, rendezvous=rendezvous)
    options = Options(
        num_replicas, strategy=strategy, communicator=communicator, hosts=hosts, export=tuple(export or ()),
        log_dir=log_dir, prefix=prefix, node=node, max_restarts=max_restarts, backup_dir=backup_dir,
        profile=profile, profile_dir=profile_dir, bind_cores=bind_cores, speaks=speaks,
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


@app.command(cls=_CommandOfScript, context_settings={"allow_interspersed_args": False})
def verify(
    script: _Script,
    arguments: _Arguments = None,
    num_replicas: Annotated[int, typer.Option("-n", "--num-replicas", metavar="N", help="How many replicas.")] = 2,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="auto or multi-worker (a process per replica), or mirrored (one process).")
    ] = "auto",
    communicator: Annotated[str, typer.Option(metavar="NAME", help="How processes communicate, as for tfrep run.")] = "auto",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", help="How many steps each epoch takes, and how many of each function are compared tensor by tensor."
        ),
    ] = 3,
    full: Annotated[
        bool, typer.Option("--full", metavar="", help="Let each epoch take all its steps. No more of them are compared.")
    ] = False,
    as_module: Annotated[bool, typer.Option("-m", "--module", metavar="", help="SCRIPT is a module, as for python -m.")] = False,
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


@app.command(cls=_Command, context_settings={"ignore_unknown_options": True})
def estimate(
    script: Annotated[str, typer.Argument(help="The script to look at.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its own arguments.")] = None,
    replicas: Annotated[int, typer.Option("-n", "--replicas", help="How many replicas share the work.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a replica has, as 16GB; else the memory of the smallest GPU here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object, with sizes in bytes.")] = False,
    as_module: Annotated[bool, typer.Option("-m", "--module", metavar="", help="SCRIPT is a module, as for python -m.")] = False,
) -> None:
    """Say how much memory each replica of a script's model needs, and which settings would make it fit.

    The script runs on the CPU until its first training step is traced, and trains nothing. Options that are not of this command,
    and all after --, belong to the script.
    """
    from tfrep_strategy.contrib.estimate import bytes_of, lines_of, memory_of_gpus
    from tfrep_strategy.contrib.estimate import estimate as estimated

    limit = memory_of_gpus() if memory is None else bytes_of(memory)
    found = estimated(script, arguments or [], replicas=replicas, memory=limit, as_module=as_module)
    if as_json:
        import json

        typer.echo(json.dumps(found))
    else:
        for line in lines_of(found):
            typer.echo(line)
    raise typer.Exit(0 if limit is None or found["fits"] else 1)


@app.command("profile", cls=_Command)
def profile_now(
    run_pid: Annotated[
        int, typer.Argument(metavar="PID", min=1, max=2**22, help="The process id of `tfrep run`.", show_default=False)
    ],
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long to trace, at most 60.")] = 2.0,
    profile_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the traces. Default: that of the run.")
    ] = None,
) -> None:
    """Trace all ranks of a run that is running on this machine, at the same time, and show what they do."""
    from tfrep_strategy.cluster.profiles.requests import profile_run

    profile_run(run_pid, seconds, profile_dir)


@app.command(cls=_Command)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object instead of a table.")] = False,
    patches: Annotated[
        bool, typer.Option("--patches", metavar="", help="List what is replaced in Keras and TensorFlow, and why.")
    ] = False,
    gpus: Annotated[
        bool,
        typer.Option(
            "--gpus",
            metavar="",
            help="Compare replicas on all GPUs with one device, and measure their speed, for at most 15 minutes.",
        ),
    ] = False,
    report: Annotated[Path, typer.Option(help="With --gpus: the JSON file to write.")] = Path("tfrep-gpus.json"),
    devices: Annotated[str, typer.Option(help="With --gpus: GPU; or CPU, to try the report itself on two logical CPUs.")] = "GPU",
    hang: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Show where each rank of a run that hung was. FOLDER has the logs.")
    ] = None,
) -> None:
    """Show what is installed and what was detected, and test that processes can talk to each other."""
    if hang is not None:
        from tfrep_strategy.contrib.hang_report import show_hang

        show_hang(hang, as_json=as_json)
        return
    from tfrep_strategy.cluster.startup_log import quiet_start
    from tfrep_strategy.core.limits import check_keras_backend

    check_keras_backend()
    if gpus:
        from tfrep_strategy.contrib.gpu_report.report import write_report

        if not write_report(devices, report, as_json=as_json):
            raise typer.Exit(1)
        return
    if patches:
        with quiet_start():
            from tfrep_strategy.strategies.patches import show as show_patches
        show_patches(as_json)
        return
    from tfrep_strategy.contrib.doctor import examine, show

    if not show(examine(), as_json=as_json):
        raise typer.Exit(1)


@app.command(cls=_Command)
def demo(
    picture: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write loss curves and throughput bars (PNG; needs matplotlib).")
    ] = Path("tfrep-demo.png"),
) -> None:
    """Train a small network on handwritten digits in every way, and compare."""
    from tfrep_strategy.cluster.startup_log import quiet_start
    from tfrep_strategy.core.limits import check_keras_backend

    check_keras_backend()
    with quiet_start():
        from tfrep_strategy.contrib.demo import run_demo
    run_demo(picture)


@horovod_app.command(cls=_Command)
def install(
    with_: Annotated[
        list[str] | None, typer.Option("--with", metavar="nccl|mpi", help="Also build in NCCL or MPI; repeatable.")
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where built wheels are kept. Default: TFREP_CACHE_DIR, or the user's cache."),
    ] = None,
) -> None:
    """Build Horovod for the TensorFlow that is installed, or take the wheel of an earlier build, and install it."""
    from tfrep_strategy.cluster.horovod.build import build_wheel, install_wheel, status

    wheel = build_wheel(with_ or (), cache_dir)
    install_wheel(wheel)
    typer.echo(status().describe())


@horovod_app.command("status", cls=_Command)
def show_status() -> None:
    """Say which Horovod is installed, and what is built in."""
    from tfrep_strategy.cluster.horovod.build import status

    found = status()
    typer.echo(found.describe())
    if found.problem:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
