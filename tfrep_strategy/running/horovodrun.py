"""Horovod's own launcher, started for `tfrep run --hosts`, with fewer doors: on its ports and on command lines."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tfrep_strategy.errors import ConfigurationError, message
from tfrep_strategy.rendezvous.confinement import Network, confine, machines_of_run
from tfrep_strategy.rendezvous.connections import LOOPBACK

EXPORTED = ("CUDA_", "GLOO_", "HOROVOD_", "KERAS_", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "PYTHON", "TFREP_", "TF_", "XLA_")
"""How variables are named that other machines get, beside `PATH`: on command lines, which every user there can read."""


def main(arguments: Sequence[str], own_path: Sequence[str]) -> None:
    """Runs `horovodrun`.

    Args:
        arguments: The hosts, as "host1:4,host2:4", and what follows `horovodrun`.
        own_path: Unused.
    """
    del own_path
    from horovod.runner import gloo_run, launch
    from horovod.runner.common.util import network
    from horovod.runner.http import http_server

    hosts, *rest = arguments
    networks, problem = machines_of_run(f"{LOOPBACK}:0", hosts.split(","))
    if problem is not None:
        raise ConfigurationError(
            message(
                f"Horovod's launcher would take connections from everywhere: {problem}.",
                hint="correct the hosts, or start `tfrep run --nnodes` on each machine.",
                hosts=hosts,
            )
        )
    exported = set() if networks is None else {name for name in os.environ if name == "PATH" or name.startswith(EXPORTED)}
    if networks is not None:
        kept = ", ".join(sorted(set(os.environ) - exported))
        warnings.warn(
            "Horovod's launcher has no secret: programs on the machines of this run, of other users too, can run code as you."
            f"\nHint: `tfrep run --nnodes` has one. Variables that other machines do not get: {kept}.",
            stacklevel=1,
        )
    for module in (http_server, network):
        module.find_port = _confined(module.find_port, networks)
    gloo_run._slot_info_to_command_fn = _exporting(gloo_run._slot_info_to_command_fn, exported)
    sys.argv = ["horovodrun", *rest]
    launch.run_commandline()


def _confined(find_port: Callable[[Any], Any], networks: Sequence[Network] | None) -> Callable[[Any], Any]:
    """Confines the server that `find_port` makes, before it serves anybody."""

    def found(make_server: Any) -> Any:
        server, port = find_port(make_server)
        confine(server.socket, networks)
        return server, port

    return found


def _exporting(make: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """Limits the variables on the command lines of ranks. Ranks on this machine inherit all others."""

    def limited(run_command: str, environ: dict[str, str]) -> Any:
        return make(run_command, {name: value for name, value in environ.items() if name in names})

    return limited
