"""What can go wrong between the controller and its actors."""

from __future__ import annotations

from forge_async.errors import ForgeError


class ActorDied(ForgeError):
    """The process of an actor ended, or Monarch reports the actor as failed."""


class ReplicaDied(ActorDied):
    """A service's replica died while it held this call. Others go on; the caller may try again."""


class ServiceGaveUp(ForgeError):
    """Every replica of a service failed to start too often: no call can be answered any more."""


class RemoteError(ForgeError):
    """An endpoint raised something other than a :class:`ForgeError`; the message carries the remote traceback."""
