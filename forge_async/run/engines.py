"""The processes of a run: brought up in order, put in sync, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.config import Config, to_yaml
from forge_async.errors import prefix_errors
from forge_async.journal import Journal, turns_file
from forge_async.mesh import ActorHandle, Service, plan_placement
from forge_async.mesh.runtime import visible_gpus
from forge_async.mesh.service import Replica
from forge_async.observability.advice import Resources
from forge_async.policy.actor import PolicyActor
from forge_async.rollout.reward_worker import RewardPool
from forge_async.store import WeightStore
from forge_async.trainer.actor import TrainerActor

if TYPE_CHECKING:
    from forge_async.loop import AsyncLoop
    from forge_async.replay import Replay


class Engines:
    """The weight store, the reward workers, the trainer and the policy service. Needs an open ``MeshRuntime``.

    Args:
        journal: is told of the machine and of the first version; a replay is one, too.
        record: writes an event.
        tell: shows what is being done.
    """

    def __init__(
        self, config: Config, journal: Journal, record: Callable[..., None], tell: Callable[[str], None]
    ) -> None:
        self.config, self.journal, self.record, self.tell = config, journal, record, tell
        self.store: WeightStore
        self.rewards: RewardPool
        self.trainer: ActorHandle
        self.policy: Service
        self.resources: Resources | None = None
        """What trainer and generators run on, once it is planned."""
        self.loop: AsyncLoop | None = None
        """Once it is made: a respawned replica takes from it what the others have."""

    async def start(self, checkpoint: Path | None, replay: Replay | None = None) -> dict[str, Any]:
        """Bring everything up, with the weights of ``checkpoint`` where there is one, and publish them.

        Returns:
            What was published, and is live in every replica: ``version``, ``digest`` and more.
        """
        config = self.config
        gpus = config.trainer.device != "cpu" and bool(visible_gpus())
        ranks = config.policy.tensor_parallel_size
        placement = plan_placement(config.placement, config.trainer.procs, config.policy.num_replicas, ranks)
        threads = {"trainer": len(placement.trainer) / config.trainer.procs, "policy": len(placement.policy[0]) / ranks}
        policy_cores = {core for cores in placement.policy for core in cores}
        if gpus:
            wanted = config.trainer.procs, config.policy.num_replicas * ranks
            self.resources = Resources(*wanted, "GPUs", shared=len(visible_gpus()) < sum(wanted))
        else:
            shared = bool(policy_cores & set(placement.trainer))
            self.resources = Resources(len(placement.trainer), len(policy_cores), shared=shared)
        self.journal.started("cuda" if gpus else "cpu", threads, to_yaml(config))
        if config.resume:
            self.journal.close()  # what was open at the checkpoint is not in the schedule

        self.tell("starting the weight store and the reward workers")
        dtype = config.policy.dtype if config.store.dtype == "auto" else config.store.dtype
        trainer = config.trainer.beside(config.policy.dtype)
        self.store = await WeightStore.create(replace(config.store, dtype=dtype))
        with prefix_errors("reward"):
            self.rewards = await RewardPool.create(config.reward)
        self.tell("starting the trainer and the policy service: imports take a while")
        self.trainer, self.policy = await both(
            TrainerActor.options(procs=config.trainer.procs, cores=placement.trainer, with_gpus=gpus).spawn(
                trainer, config.model.path, store=self.store, total_steps=config.steps, seed=config.seed
            ),
            PolicyActor.options(procs=ranks, cores=placement.policy, with_gpus=gpus).as_service(
                config.policy,
                config.model.path,
                store=self.store,
                seed=config.seed,
                num_replicas=config.policy.num_replicas,
                on_respawn=self.catch_up,
            ),
        )
        pids = [pid for replica in self.policy.replicas for pid in replica.pids]
        self.record("started", trainer=self.trainer.pids(), policy=pids)
        await both(self._set_up_trainer(), self._set_up_policy(replay))
        if checkpoint is not None:
            self.tell(f"loading {checkpoint}")
            await self.trainer.call("load_checkpoint", str(checkpoint))
        self.tell("publishing the first weights")
        version = (await self.trainer.call("publish"))[0]
        published: dict[str, Any] = (await self.trainer.call("published", version))[0]
        self.journal.published(version, published["digest"])
        self.record("published", **published)
        for report in await self.policy.fan_out("sync", version):
            if isinstance(report, BaseException):
                raise report
        return published

    async def _set_up_trainer(self) -> None:
        with prefix_errors("trainer"):
            await self.trainer.call("setup")

    async def _set_up_policy(self, replay: Replay | None) -> None:
        async def set_up(replica: Replica) -> None:
            assert replica.handle is not None
            name = turns_file(replica.index)
            folder = self.journal.folder
            record = str((folder / name).resolve()) if folder is not None and not self.config.resume else None
            repeated = str((replay.recorded.folder / name).resolve()) if replay is not None else None
            await replica.handle.call("setup", record=record, replay=repeated)

        with prefix_errors("policy"):
            await asyncio.gather(*map(set_up, self.policy.replicas))

    async def catch_up(self, handle: ActorHandle) -> None:
        """A new replica builds its engine and takes the newest published version before it gets requests."""
        self.record("respawned", pids=handle.pids())
        await handle.call("setup")
        mode, synced, held_at = self.config.policy.update, -1, None
        # What the loop tells the replicas meanwhile does not reach it, as it is not healthy yet. Between the last
        # comparison and its becoming so there is no await: it has the newest version then, or is told of it, it is held
        # exactly if the others are, and treats new versions as they do.
        while self.loop is not None:
            newest, wanted = max(self.loop.tally.digests, default=-1), self.loop.config.policy.update
            if wanted != mode:
                mode = wanted
                await handle.call("set_mode", mode.mode, mode.kv)
            elif newest > synced:
                await handle.call("sync", newest)
                synced = newest
            elif self.loop.held_at != held_at:
                held_at = self.loop.held_at
                await (handle.call("release") if held_at is None else handle.call("hold", held_at))
            else:
                break

    async def stop(self) -> None:
        """End what ends better by itself; the runtime ends the rest."""
        if hasattr(self, "rewards"):
            with suppress(Exception):  # its processes are ended with the runtime in any case
                await self.rewards.stop()
        if hasattr(self, "store"):
            await self.store.close()


async def both(first: Any, second: Any) -> tuple[Any, Any]:
    """Await two at once; when one fails the other is cancelled and awaited, and the failure is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return tasks[0].result(), tasks[1].result()
