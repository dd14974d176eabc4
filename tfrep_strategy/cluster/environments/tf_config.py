"""Processes described by the variable `TF_CONFIG`, as TensorFlow's own strategies read it."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator

from tfrep_strategy.cluster.environments.base import Environment
from tfrep_strategy.core.validation import Rank, checked
from tfrep_strategy.errors import ConfigurationError, message

_HINT = 'it should look like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


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
        config = read_tf_config()
        ranks = config.cluster
        jobs = {job: addresses for job, addresses in (("chief", ranks.chief), ("worker", ranks.worker)) if addresses}
        if len(ranks.chief) > 1:
            raise _refusal("TF_CONFIG lists more than one chief.", chief=ranks.chief)
        kind, index = config.task.type, config.task.index
        if kind not in jobs:
            known = " or ".join(repr(job) for job in jobs) or "'worker', with its addresses under cluster"
            what = "has no rank" if kind in (ranks.model_extra or {}) else "is not in the cluster"
            raise ConfigurationError(
                message(f"TF_CONFIG: the job of this task {what}.", hint=f"the task's type must be {known}.", type=kind)
            )
        if index >= len(jobs[kind]):
            raise _refusal(f"TF_CONFIG: the task's index is out of range; its job has {len(jobs[kind])}.", index=index)
        addresses = [*ranks.chief, *ranks.worker]
        super().__init__(
            rank=index if kind == "chief" else len(ranks.chief) + index,
            size=len(addresses),
            hosts=[address.rpartition(":")[0] for address in addresses],
            addresses=addresses,
        )


def read_tf_config() -> TfConfig:
    """Reads `TF_CONFIG`, which is set.

    Raises:
        ConfigurationError: It is not JSON, or does not describe a cluster and a task.

    Example:
        >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        >>> read_tf_config().task.index
        0
    """
    return checked(TfConfig, "TF_CONFIG", os.environ["TF_CONFIG"], hint=_HINT, is_json=True)


def _in_order(addresses: Any) -> Any:
    # TensorFlow also accepts {"0": "host:port", ...}, for clusters that are described only in part.
    if isinstance(addresses, dict) and addresses.keys() == {str(index) for index in range(len(addresses))}:
        return [addresses[str(index)] for index in range(len(addresses))]
    return addresses


_Addresses = Annotated[list[str], BeforeValidator(_in_order)]


class _Cluster(BaseModel, extra="allow"):
    chief: _Addresses = []
    worker: _Addresses = []


class _Task(BaseModel):
    type: str
    index: Rank


class TfConfig(BaseModel):
    """The content of `TF_CONFIG`. Jobs without ranks may be described in part, and are not checked."""

    cluster: _Cluster
    task: _Task


def _refusal(what: str, **received: Any) -> ConfigurationError:
    return ConfigurationError(message(what, hint=_HINT, **received))
