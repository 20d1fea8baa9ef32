"""Whether and where a live run serves its page."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.errors import require

PORT = 8790
MONARCH_PORT = 8265
"""Monarch's own; when it is taken, the next free one of the twenty that follow."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class DashboardConfig:
    """The page of a live run; ``forge-async dashboard RUN`` serves that of any run, also later."""

    enabled: bool = True
    """Serve the page while the run goes on, in a process of its own."""
    port: int = PORT
    """Port; when it is taken, the next free one of the twenty that follow."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a token."""
    token: str = ""
    """What a browser has to bring; "" makes one up where ``host`` needs one. It is part of the address that is printed.
    """
    control: bool = False
    """Whether the page may pause, resume and stop the run."""
    monarch: bool = False
    """Serve Monarch's own page about meshes, actors and messages, too: on a loopback address, linked from the run's."""

    def __post_init__(self) -> None:
        require(1 <= self.port <= 65535, "port", self.port, "a port from 1 to 65535")
        require(bool(self.host), "host", self.host, "an address of this machine, such as 127.0.0.1 or 0.0.0.0")
        require(
            not self.token or (len(self.token) >= 16 and self.token.isascii() and self.token.isprintable()),
            "token",
            "*" * len(self.token),
            "at least 16 ASCII characters",
        )
