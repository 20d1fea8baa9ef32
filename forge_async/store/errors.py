"""What can go wrong with the weight store."""

from __future__ import annotations

from forge_async.errors import ForgeError


class StoreError(ForgeError):
    """A version cannot be written, committed or read; the message says which and why."""


class VersionGone(StoreError):
    """The version asked for is not (or no longer) in the store."""


class LeaseExpired(StoreError):
    """A reader was not heard of for ``store.lease_ttl_s``: what it has read may be torn."""


class Superseded(StoreError):
    """An attempt at a version is void, since another has begun or a newer version is committed: read that instead."""
