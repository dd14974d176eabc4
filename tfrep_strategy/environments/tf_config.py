"""Processes described by the variable `TF_CONFIG`, as TensorFlow's own strategies read it."""

from __future__ import annotations

import json
import os
from typing import Any

from tfrep_strategy.environments.base import Environment
from tfrep_strategy.errors import ConfigurationError, message

_RANK_JOBS = ("chief", "worker")
_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


class TfConfigEnvironment(Environment):
    """Reads the cluster and the task from `TF_CONFIG`.

    The chief, if there is one, is rank 0; the workers follow. `ps` and `evaluator` jobs may be listed, but are not ranks.
    Processes with the same host share a machine.

    Raises:
        ConfigurationError: `TF_CONFIG` is not JSON, lacks the cluster or the task, or they contradict each other.

    Example:
        >>> os.environ["TF_CONFIG"] = (
        ...     '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
        ... )
        >>> TfConfigEnvironment().rank, TfConfigEnvironment().local_rank
        (2, 1)
    """

    name = "TF_CONFIG"
    variables = ("TF_CONFIG",)

    @classmethod
    def detect(cls) -> bool:
        """Returns whether `TF_CONFIG` is set and not empty. `{}` means a single process, as in TensorFlow."""
        return os.environ.get("TF_CONFIG", "").strip() not in ("", "{}")

    def __init__(self) -> None:
        text = os.environ["TF_CONFIG"]
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise _refusal(f"TF_CONFIG is not JSON ({error}).", TF_CONFIG=text) from None
        cluster = _section(config, "cluster")
        task = _section(config, "task")
        jobs = {job: _addresses_of(job, cluster[job]) for job in _RANK_JOBS if job in cluster}
        if len(jobs.get("chief", [])) > 1:
            raise _refusal("TF_CONFIG lists more than one chief.", chief=jobs["chief"])
        kind, index = task.get("type"), _index_of(task)
        if kind not in jobs:
            known = " or ".join(repr(job) for job in jobs) or "'worker', with its addresses under cluster"
            what = "has no rank" if kind in cluster else "is not in the cluster"
            raise ConfigurationError(
                message(f"TF_CONFIG: the job of this task {what}.", hint=f"the task's type must be {known}.", type=kind)
            )
        if not 0 <= index < len(jobs[kind]):
            raise _refusal(
                f"TF_CONFIG: the task's index is out of range; job {kind!r} has {len(jobs[kind])}.", index=index
            )
        addresses = [address for job in jobs.values() for address in job]
        rank = index if kind == next(iter(jobs)) else len(jobs["chief"]) + index
        super().__init__(
            rank=rank,
            size=len(addresses),
            hosts=[address.rpartition(":")[0] for address in addresses],
            addresses=addresses,
        )


def _section(config: Any, name: str) -> dict[str, Any]:
    section = config.get(name) if isinstance(config, dict) else None
    if not isinstance(section, dict) or not section:
        raise _refusal(f"TF_CONFIG lacks {name!r}.", TF_CONFIG=config)
    return section


def _addresses_of(job: str, addresses: Any) -> list[str]:
    # TensorFlow also accepts {"0": "host:port", ...}, for clusters that are described only in part.
    if isinstance(addresses, dict) and sorted(addresses) == sorted(str(index) for index in range(len(addresses))):
        addresses = [addresses[str(index)] for index in range(len(addresses))]
    if not isinstance(addresses, list) or not all(isinstance(address, str) for address in addresses):
        raise _refusal(f"TF_CONFIG: the addresses of job {job!r} are not a list of strings.", addresses=addresses)
    return addresses


def _index_of(task: dict[str, Any]) -> int:
    try:
        return int(task["index"])
    except (KeyError, TypeError, ValueError):
        raise _refusal("TF_CONFIG: the task has no integer index.", task=task) from None


def _refusal(what: str, **received: Any) -> ConfigurationError:
    return ConfigurationError(message(what, hint=f"it should look like {_EXAMPLE}", **received))
