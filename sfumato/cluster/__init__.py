"""Sharded image sets that are never loaded whole, and vaults over them: in this process, or on a Ray cluster."""

from sfumato.cluster.cluster_vault import ClusterVault
from sfumato.cluster.executors import Executor, connect
from sfumato.cluster.sharded_images import ShardedImages, check_apart, open_shards

__all__ = ["ClusterVault", "Executor", "ShardedImages", "check_apart", "connect", "open_shards"]
