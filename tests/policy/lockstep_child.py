"""Rank 1 of ``test_lockstep.py``: answers with what it received, until the end, a difference or the leader's death."""

from __future__ import annotations

import sys
from multiprocessing.connection import Client

import torch.distributed as dist

from forge_async.policy.lockstep import Lockstep


def main(port: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2)
    lockstep = Lockstep()
    with Client(address) as connection:
        try:
            while (posted := lockstep.receive(lambda version: f"own {version}", state=7)) is not None:
                connection.send([(kind, str(type(payload)), str(payload)) for kind, payload in posted])
                if posted and posted[0][0] == "gather":
                    connection.send(lockstep.gather("one"))
            connection.send("end")
        except Exception as error:
            connection.send(repr(error))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
