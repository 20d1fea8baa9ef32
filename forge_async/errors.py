"""Errors a user can cause: each names the key, the value, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ForgeError(Exception):
    """Base of every error with a message meant for the user; the apps print it without a traceback."""


class ConfigError(ForgeError):
    """A setting is wrong.

    Args:
        key: dotted name of the setting, relative to the dataclass that checks it; loading prefixes the rest.
        value: the offending value.
        allowed: what would have been accepted, in words.
        remedy: what to do, where ``allowed`` does not already say it.
    """

    def __init__(self, key: str, value: object, allowed: str, remedy: str = "") -> None:
        self.key, self.value, self.allowed, self.remedy = key, value, allowed, remedy
        super().__init__(f"{key} = {value!r}: must be {allowed}." + (f" {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[object, ...]]:
        """Its arguments are not those of ``Exception``: it crosses processes by its own."""
        return type(self), (self.key, self.value, self.allowed, self.remedy)

    def prefixed(self, prefix: str) -> ConfigError:
        """The same error with ``prefix`` before its key."""
        return ConfigError(f"{prefix}.{self.key}" if prefix else self.key, self.value, self.allowed, self.remedy)


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Give a :class:`ConfigError` raised inside its full key: a room names only its own settings."""
    try:
        yield
    except ConfigError as error:
        raise error.prefixed(prefix) from error.__cause__


def require(condition: bool, key: str, value: object, allowed: str, remedy: str = "") -> None:
    """Raise :class:`ConfigError` unless ``condition`` holds; for ``__post_init__`` of config dataclasses."""
    if not condition:
        raise ConfigError(key, value, allowed, remedy)


class ModelNotFoundError(ForgeError):
    """A model folder is missing or incomplete."""


class DataError(ForgeError):
    """A dataset row or a rollout's record is unusable; the message names it and why."""


class RunStateError(ForgeError):
    """A run was asked for what it cannot do in its present state; the message says which call helps."""


class RunFailed(ForgeError):
    """A run ended by a fault; the message carries the cause and, where there is one, the resume command."""
