"""A local cluster for a notebook or a test, and the resolver that tells its addresses to a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfrep_strategy.clusters.cluster import LocalCluster, check_counts


class LocalClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Tells a strategy the addresses of a `LocalCluster`.

    Attributes:
        cluster: The cluster, with `kill`, `start` and `pid`.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(tf.train.ClusterSpec(cluster.spec), rpc_layer="grpc")
        self.cluster = cluster


@contextlib.contextmanager
def local_cluster(workers: int = 2, servers: int = 1) -> Iterator[LocalClusterResolver]:
    """Starts workers and parameter servers as processes on this machine, and ends them with the body.

    They end too when this process is killed. TensorFlow's servers listen on all interfaces and trust whoever connects.

    Args:
        workers: How many workers, at least one.
        servers: How many parameter servers, at least one.

    Yields:
        What `ParameterServerStrategy` takes.

    Raises:
        ConfigurationError: A number cannot be used.
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
