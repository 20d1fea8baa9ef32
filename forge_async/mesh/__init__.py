"""Monarch meshes: actors on pinned processes, services with replicas, supervision, placement."""

from forge_async.mesh.actor import ActorBuilder, ActorHandle, ActorOptions, ForgeActor
from forge_async.mesh.errors import ActorDied, RemoteError, ReplicaDied, ServiceGaveUp
from forge_async.mesh.placement import Placement, PlacementConfig, plan_placement
from forge_async.mesh.runtime import MeshRuntime, current_runtime
from forge_async.mesh.service import Replica, Service

__all__ = [
    "ActorBuilder",
    "ActorDied",
    "ActorHandle",
    "ActorOptions",
    "ForgeActor",
    "MeshRuntime",
    "Placement",
    "PlacementConfig",
    "RemoteError",
    "Replica",
    "ReplicaDied",
    "Service",
    "ServiceGaveUp",
    "current_runtime",
    "plan_placement",
]
