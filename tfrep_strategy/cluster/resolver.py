"""Resolvers give a strategy the addresses of its processes. `local_cluster` starts a cluster for a notebook or a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrep_strategy.cluster.environments import Environment, TfConfigEnvironment
from tfrep_strategy.cluster.local_cluster import LocalCluster, check_counts


class LocalClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Gives a strategy the addresses of a `LocalCluster`.

    Attributes:
        cluster: The cluster, with `kill`, `start` and `pid`.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(tf.train.ClusterSpec(cluster.spec), rpc_layer="grpc")
        self.cluster = cluster


@contextlib.contextmanager
def local_cluster(workers: int = 2, servers: int = 1) -> Iterator[LocalClusterResolver]:
    """Starts workers and parameter servers as processes on this machine, and ends them with the body.

    They end, too, when this process is killed. Only programs of this machine can connect to them.

    Args:
        workers: Number of workers, at least one.
        servers: Number of parameter servers, at least one.

    Yields:
        The resolver for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: A number is invalid.
        PeerError: The processes do not start.

    Example:
        >>> with tfrep.local_cluster(workers=2, servers=1) as cluster:
        ...     tfrep.ParameterServerStrategy(cluster).num_workers
        2
    """
    check_counts(workers=workers, servers=servers)
    cluster = LocalCluster(workers, servers)
    try:
        yield LocalClusterResolver(cluster)
    finally:
        cluster.stop()


def resolver_of(environment: Environment) -> Any:
    """Returns the `cluster_resolver` of a `MultiWorkerStrategy`, which scripts for TensorFlow's strategies read."""
    resolvers = tf.distribute.cluster_resolver
    if isinstance(environment, TfConfigEnvironment):
        return resolvers.TFConfigClusterResolver()
    addresses = environment.addresses or [f"{host or 'localhost'}:{rank}" for rank, host in enumerate(environment.hosts)]
    cluster = tf.train.ClusterSpec({"worker": addresses})
    return resolvers.SimpleClusterResolver(cluster, task_type="worker", task_id=environment.rank, rpc_layer="grpc")
