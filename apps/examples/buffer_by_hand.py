"""The buffer on its own, without an engine: admit, finish, train within the staleness bound, and read the ledger.

python apps/examples/buffer_by_hand.py
"""

from __future__ import annotations

import asyncio

import numpy as np

from forge_async.buffer import BufferConfig, RolloutBuffer
from forge_async.types import Completion, Episode, Group, Prompt, Turn


def sampled(prompt: Prompt, version: int) -> Group:
    """Two episodes of three tokens each, as a policy of ``version`` might have made them."""
    ids, zeros, versions = np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), np.full(3, version, np.int32)
    turn = Turn(Completion(prompt.token_ids, ids, zeros, versions, versions, "stop"))
    return Group(prompt, tuple(Episode(f"{prompt.prompt_id}.{i}", prompt.prompt_id, (turn,), i) for i in range(2)))


async def main(steps: int = 4) -> None:
    source = iter([Prompt(f"prompt-{i}", (), np.array([1, 2], np.int32)) for i in range(100)])
    buffer = RolloutBuffer(BufferConfig(groups_per_step=2, max_staleness=1, window=1, retries=0))
    batches, slow = buffer.batches(), None
    for version in range(steps):
        while buffer.room and (prompt := await buffer.admit(source)):  # with max_staleness 1, two batches are open
            group = sampled(prompt, version)
            if slow is None:
                slow = group  # its rollout takes two steps: the window lets training go on without it
            else:
                buffer.finish(group)
        if slow is not None and version == 2:
            buffer.finish(slow)  # its tokens are two versions old now, which the gate refuses
        print(buffer.peek())
        batch = await anext(batches)
        print(f"version {version} trains {', '.join(group.prompt.prompt_id for group in batch)}\n")
        buffer.trained(batch, version + 1)
        buffer.advance(version + 1)  # every generator is on the new version: more may be admitted
    buffer.close("run_ended")
    print(buffer.ledger.summary())


if __name__ == "__main__":
    asyncio.run(main())
