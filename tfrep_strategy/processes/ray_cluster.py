"""Places for ranks on the machines of a Ray cluster, or on this machine alone through a Ray of its own."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfrep_strategy.errors import ConfigurationError, install_hint, message
from tfrep_strategy.limits import meeting_seconds
from tfrep_strategy.processes import ray_place
from tfrep_strategy.processes.ranks import Events
from tfrep_strategy.processes.ray_process import TOLD, RayProcess
from tfrep_strategy.rendezvous.confinement import is_this_machine
from tfrep_strategy.validation import Address, check_fields, checked

_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 25.0
_SAY_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_STORE_BYTES = 100 << 20
"""The object store of an own Ray: nothing but output goes through it."""
_ON_THIS_MACHINE = "local"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
"""A run tells nobody that it runs. Ray reads this when it is imported."""
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has a Ray of this machine alone listen on the loopback interface, on Linux too. It replaces a loopback address that it gets."""


@dataclass(frozen=True)
class RayPlaces:
    """Which places Ray is to give to ranks.

    Args:
        address: "host:port" of a cluster, or "auto" for the one of this machine. Default: `RAY_ADDRESS`. Without it, a Ray of its
            own is started on this machine, and ends with the run.
        cpus_per_rank: How many of Ray's CPUs each rank gets.
        gpus_per_rank: How many of its GPUs. Default: one if there are enough for all ranks, else none.

    Raises:
        ConfigurationError: One of them cannot be used.

    Example:
        >>> RayPlaces("head:6379", cpus_per_rank=4).address
        'head:6379'
    """

    address: str | None = None
    cpus_per_rank: float = 1.0
    gpus_per_rank: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cpus_per_rank < 0 or (self.gpus_per_rank or 0) < 0:
            raise ConfigurationError(
                message(
                    "A rank cannot have fewer than no CPUs or GPUs.",
                    hint="0 reserves none.",
                    cpus_per_rank=self.cpus_per_rank,
                    gpus_per_rank=self.gpus_per_rank,
                )
            )
        address = self.resolved_address
        if address.startswith("ray://"):
            hint = "call `tfrep run` on a machine of the cluster, as in `ray job submit -- tfrep run --engine ray -n 4 train.py`."
            raise ConfigurationError(message("Ray's client does not pass on what ranks write.", hint=hint, ray_address=address))
        if address not in (_ON_THIS_MACHINE, "auto"):
            checked(
                Address, "ray_address", address, hint='give "host:port", as `ray start --head` prints it, or "auto".'
            )

    @property
    def resolved_address(self) -> str:
        """The address, or "local" for a Ray of its own."""
        return self.address or os.environ.get("RAY_ADDRESS") or _ON_THIS_MACHINE


@dataclass(frozen=True)
class RayMachine:
    """A machine on which Ray has given places.

    Args:
        name: What it is called.
        ip: Its address.
        bundles: The numbers of the places in their placement group.
        gpus: The GPUs of these places; no words for none.
    """

    name: str
    ip: str
    bundles: tuple[int, ...]
    gpus: tuple[str, ...]


class RayCluster:
    """Places for ranks: a placement group with one bundle for each.

    Args:
        ray: The module `ray`, which is connected.
        wanted: How large they are.
        size: How many.
    """

    def __init__(self, ray: Any, wanted: RayPlaces, size: int) -> None:
        self._ray, self._size = ray, size
        has_gpus = ray.cluster_resources().get("GPU", 0) >= size
        self.gpus = float(has_gpus) if wanted.gpus_per_rank is None else wanted.gpus_per_rank
        self.bundle = {name: count for name, count in (("CPU", wanted.cpus_per_rank), ("GPU", self.gpus)) if count}
        # An empty bundle is refused.
        self._group = ray.util.placement_group([self.bundle or {"CPU": 0.001}] * size, strategy="PACK")

    def machines(self, events: Events) -> list[RayMachine]:
        """Waits until Ray has all places, also instead of those of a machine that was lost.

        Args:
            events: From `deferred_signals`.

        Returns:
            The machines, in the order of the ranks.

        Raises:
            Stopped: A signal came instead.
            ConfigurationError: It does not have them in time.
        """
        limit, start = meeting_seconds(), time.monotonic()
        say_at = start + _SAY_SECONDS
        while (machines := self._machines()) is None:
            if time.monotonic() > start + limit:
                what = f"Ray did not have places for {self._size} ranks within {limit:g} seconds."
                hint = "use fewer ranks, smaller places (--cpus-per-rank, --gpus-per-rank), or a larger cluster."
                raise ConfigurationError(message(what, hint=hint, place=self.bundle, free=self._free()))
            if time.monotonic() > say_at:
                say_at += _SAY_SECONDS
                what = f"{self._size} places of {_counted(self.bundle)}; free: {_counted(self._free())}"
                print(f"tfrep: waiting for Ray to have {what}.", file=sys.stderr)
            wait(events, _LOOK_SECONDS)
        return machines

    @property
    def is_here(self) -> bool:
        """Whether this machine is the whole cluster."""
        return all(is_this_machine(each["NodeManagerAddress"]) for each in self._nodes())

    def start(self, bundle: int, command: Sequence[str]) -> RayProcess:
        """Starts a process in a place."""
        # Output and what is told must not wait for each other.
        actor = self._ray.remote(concurrency_groups={TOLD: 1})(ray_place.PlaceOnRay)
        return RayProcess(self._ray, actor.options(**self._in(bundle)).remote(list(command)))

    def _in(self, bundle: int) -> dict[str, Any]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return {
            "num_cpus": self.bundle.get("CPU", 0),
            "num_gpus": self.gpus,
            "scheduling_strategy": strategy(self._group, placement_group_bundle_index=bundle),
        }

    def close(self) -> None:
        """Gives the places back."""
        self._ray.util.remove_placement_group(self._group)

    def _machines(self) -> list[RayMachine] | None:
        """Returns the machines; None if Ray has not all places, or if one was lost."""
        alive = {each["NodeID"]: each for each in self._nodes()}
        table = self._ray.util.placement_group_table(self._group)
        nodes = table["bundles_to_node_id"]
        if table["state"] == "REMOVED":
            what = "Ray has taken back the places of the run: to Ray, this launcher is lost."
            raise ConfigurationError(message(what, hint="check that Ray still runs on this machine."))
        if table["state"] != "CREATED" or not alive.keys() >= set(nodes.values()):
            return None
        bundles: dict[str, list[int]] = {}
        for bundle, node in sorted(nodes.items()):
            bundles.setdefault(node, []).append(bundle)
        seen: dict[int, Sequence[str]] = dict.fromkeys(nodes, ())
        if self.gpus:
            look = self._ray.remote(ray_place.gpus)
            seen = dict(
                zip(nodes, self._ray.get([look.options(**self._in(each)).remote() for each in nodes]), strict=True)
            )
        return [
            RayMachine(
                alive[node]["NodeManagerHostname"],
                alive[node]["NodeManagerAddress"],
                tuple(own),
                tuple(dict.fromkeys(gpu for each in own for gpu in seen[each])),
            )
            for node, own in bundles.items()
        ]

    def _nodes(self) -> list[dict[str, Any]]:
        return [each for each in self._ray.nodes() if each["Alive"]]

    def _free(self) -> dict[str, float]:
        available = self._ray.available_resources()
        return {name: available.get(name, 0.0) for name in self.bundle}


@contextlib.contextmanager
def ray_cluster(wanted: RayPlaces, size: int) -> Iterator[RayCluster]:
    """Connects to Ray, or starts one on this machine, for as long as the body runs.

    Args:
        wanted: The address, and how large places are.
        size: How many.

    Yields:
        The places.

    Raises:
        ConfigurationError: Ray is not installed, there is no cluster at the address, or it does not fit.

    Example:
        >>> with ray_cluster(RayPlaces(), 2) as cluster:  # doctest: +SKIP
        ...     cluster.machines(events)
    """
    address = wanted.resolved_address
    for name, value in (_QUIET | _ALONE | _new_token() if address == _ON_THIS_MACHINE else _QUIET).items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigurationError(message("Ray is not installed.", hint=install_hint("ray"), engine="ray")) from None
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address == _ON_THIS_MACHINE:
            options |= {
                "num_cpus": max(os.cpu_count() or 1, math.ceil(size * wanted.cpus_per_rank)),
                "include_dashboard": False,
                "object_store_memory": _STORE_BYTES,
                "_temp_dir": stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="tfrep-ray-", ignore_cleanup_errors=True)
                ),
            }
        is_over = threading.Event()
        stack.callback(is_over.set)
        _connect(ray, address, options, is_over)
        stack.callback(ray.shutdown)
        ray.cloudpickle.register_pickle_by_value(ray_place)
        stack.callback(ray.cloudpickle.unregister_pickle_by_value, ray_place)
        cluster = RayCluster(ray, wanted, size)
        stack.callback(cluster.close)
        yield cluster


def _connect(ray: Any, address: str, options: dict[str, Any], is_over: threading.Event) -> None:
    if ":" in address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            hint = "check that the cluster runs, and give the address that `ray start --head` prints."
            what = f"Nobody listens at the address of the Ray cluster ({error.strerror or error})."
            raise ConfigurationError(message(what, hint=hint, ray_address=address)) from None
    is_own = address == _ON_THIS_MACHINE
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            ray.init(address=address, **options)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
            is_over.wait()  # A Ray of our own ends with the thread that has started it.

    # In another thread Ray leaves the handlers of signals alone, and nobody has to wait for a server that says nothing.
    threading.Thread(target=connect, daemon=True, name="tfrep-ray").start()
    told = "no answer"
    with contextlib.suppress(queue.Empty):
        problem = done.get(timeout=None if is_own else _ANSWER_SECONDS)
        if problem is None:
            _take_signals_back()
            return
        told = str(problem).strip() or type(problem).__name__
    hint = "check the address, and that the cluster has this Python and this Ray. If it was started with a token, set"
    hint += " RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH if the token is not in Ray's own file."
    what = f"Cannot connect to Ray ({told})."
    raise ConfigurationError(message(what, hint=hint, ray_address=address, ray=ray.__version__))


def _take_signals_back() -> None:
    """Gives the handlers of Python back to signals that Ray's native code has taken. It would end the launcher at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


class Stopped(Exception):  # noqa: N818
    """A signal came while a run was waiting for Ray.

    Args:
        number: Its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def wait(events: Events, seconds: float) -> None:
    """Waits for some seconds.

    Args:
        events: From `deferred_signals`.
        seconds: How many.

    Raises:
        Stopped: A signal came.

    Example:
        >>> wait(queue.SimpleQueue(), 0.1)
    """
    deadline = time.monotonic() + seconds
    with contextlib.suppress(queue.Empty):
        while True:
            about, number = events.get(timeout=max(deadline - time.monotonic(), 0.0))
            if about is None:
                raise Stopped(number)


def _new_token() -> dict[str, str]:
    """Returns the settings by which no other user of this machine can use a Ray of our own."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _counted(resources: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in resources.items()) or "nothing"
