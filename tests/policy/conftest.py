"""Engines for tests, each forked from one process that has imported vLLM."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from tests.policy.engine_child import serve


@pytest.fixture(scope="session")
def recorder() -> Iterator[Connection]:
    """The other end of ``engine_child.serve``: it has imported vLLM once, and forks one engine per job."""
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    server = context.Process(target=serve, args=(other,))
    with pytest.MonkeyPatch.context() as environment:  # idle OpenMP threads that spin cost more than they help
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("OMP_WAIT_POLICY", "PASSIVE")
        server.start()
    try:
        yield connection
        connection.send(None)
        server.join(30)
    finally:
        server.kill()
        server.join()
