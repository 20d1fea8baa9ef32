"""Claim: a whole GRPO step takes at most a third of the time it takes TRL's ``GRPOTrainer``, and learns no less by it.

``python benchmarks/against_trl.py [--config configs/grpo_smollm2.yaml] [--steps 5] [--warm-up 1] [--seeds 0]
[--micro-batch 64] [--folder FOLDER] [--plot FILE.png] [key=value ...]``

Needs TRL beside this project's packages: ``pip install trl==1.16.0``. Both train the same model on the same prompts in
the same order, in groups of the same size with the same rewards, sampling settings, AdamW, float32, clip and mean over
the tokens of a step; the learning rate is constant. Each has all cores, and they run one after the other, in turns over
the seeds:

* async: this project as the config says, generator and trainer beside each other on cores of their own;
* sync: ``buffer.max_staleness=0``, every core for each phase, so that what is trained on is never stale, as in TRL;
* TRL: one process with as many threads.

A step's time is that between the ends of two steps, with all that is between: generating, scoring, training, new
weights. The median leaves the warm-up out. TRL generates with Transformers, which is what it does on a CPU;
``--micro-batch`` is how many of a step's completions it has in one forward pass. ``--folder`` keeps what was measured
and does not run it again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from forge_async.config import Config, load_config
from forge_async.observability.jsonl import read
from forge_async.observability.plot import smooth

ROOT = Path(__file__).resolve().parent.parent
FIXED = ["trainer.optimizer.decay=constant", "trainer.optimizer.warmup_steps=0"]
QUIET = ["metrics.console=false", "metrics.plot=false", "checkpoint.export_hf=false", "dashboard.enabled=false"]
COLOURS = {"async": "#1b7f5c", "sync": "#2f6fb0", "TRL": "#b03a48"}
LABELS = {"async": "forge_async", "sync": "forge_async, synchronous"}
TIME_LIMIT = 1 / 3


@dataclass(frozen=True)
class Run:
    """Of one run; an entry per step."""

    step_s: list[float]
    """Seconds between the ends of two steps; the first step has none."""
    rewards: list[float]
    """Mean over the step's completions."""

    def settled(self, warm_up: int) -> list[float]:
        """The times of the steps after the first ``warm_up``."""
        return self.step_s[warm_up - 1 :]


def ours(arm: str, options: argparse.Namespace, folder: Path, seed: int) -> Run:
    sys.path.append(str(ROOT))
    from benchmarks.async_vs_sync import SYNCHRONOUS, every_core

    own = [*SYNCHRONOUS, *every_core()] if arm == "sync" else []
    own += [f"steps={options.warm_up + options.steps}", f"seed={seed}", f"output_dir={folder}", f"name={arm}-{seed}"]
    command = [sys.executable, str(ROOT / "apps" / "grpo_main.py"), "--config", options.config]
    done = subprocess.run(
        [*command, *FIXED, *QUIET, *options.overrides, *own], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"the run of seed {seed} failed with exit code {done.returncode}")
    where = Path(done.stdout.splitlines()[-1]).parent
    ended = [event["t"] for event in read(where / "events.jsonl") if event["kind"] == "step"]
    rewards = [row["reward"] for row in read(where / "metrics.jsonl")]
    return Run([after - before for before, after in pairwise(ended)], rewards)


def theirs(options: argparse.Namespace, folder: Path, seed: int) -> Run:
    """TRL, in a process of its own: this script with ``--child``."""
    result = folder / f"trl-{seed}.out"
    command = [sys.executable, __file__, "--config", options.config, "--child", str(result), "--seeds", str(seed)]
    command += ["--steps", str(options.steps), "--warm-up", str(options.warm_up)]
    command += ["--micro-batch", str(options.micro_batch), *options.overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    return Run(**json.loads(result.read_text(encoding="utf-8")))


def train_with_trl(config: Config, steps: int, micro_batch: int, seed: int) -> Run:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    from forge_async.rollout.datasets import PromptSource
    from forge_async.rollout.reward_worker import LocalScorer
    from forge_async.rollout.rewards import RewardFailure, weighted_sum

    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    room = config.policy.max_model_len - config.policy.sampling.max_tokens
    source = PromptSource(config.dataset, tokenizer, seed=seed, max_prompt_tokens=room)
    prompts = [next(source) for _ in range(steps * config.buffer.groups_per_step)]
    scorer = LocalScorer(config.reward)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}

    def reward(completions: list[Any], prompt_id: list[str], **_: Any) -> list[float]:
        async def score() -> list[float]:
            values = []
            for name, messages in zip(prompt_id, completions, strict=True):
                (parts,) = await scorer.score(by_id[name], [messages[0]["content"]])
                assert not isinstance(parts, RewardFailure), parts
                values.append(weighted_sum(scorer.specs, parts))
            return values

        return asyncio.run(score())

    ended: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ended.append(time.monotonic())
            print(f"TRL: step {len(ended)} of {steps}", flush=True)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "reward" in logs:
                rewards.append(logs["reward"])

    sampling, optimizer, loss = config.policy.sampling, config.trainer.optimizer, config.trainer.loss.resolved()
    if (loss.surrogate, loss.aggregation, loss.scale) != ("token_clip", "token_mean", "group_std"):
        raise SystemExit("this comparison is written for trainer.loss.algorithm: grpo")
    if sampling.restricting or sampling.stop_token_ids or config.rollout.truncated != "keep":
        raise SystemExit("this comparison is written for unrestricted sampling, and truncated completions kept")
    completions = config.buffer.groups_per_step * config.rollout.group_size
    if completions % micro_batch:
        raise SystemExit(f"--micro-batch {micro_batch} does not divide the {completions} completions of a step")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=completions // micro_batch,
                num_generations=config.rollout.group_size,
                max_completion_length=sampling.max_tokens,
                temperature=sampling.temperature,
                learning_rate=optimizer.lr,
                lr_scheduler_type="constant",
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                adam_epsilon=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                max_grad_norm=config.trainer.max_grad_norm,
                epsilon=loss.clip_low,
                epsilon_high=loss.clip_high,
                beta=0.0,
                loss_type="dapo",  # its name for the mean over all tokens of a step
                shuffle_dataset=False,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                seed=seed,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list([{"prompt": list(p.messages), "prompt_id": p.prompt_id} for p in prompts]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return Run([after - before for before, after in pairwise(ended)], rewards)


def measured(name: str, options: argparse.Namespace, folder: Path, seed: int) -> Run:
    """A run of ``name``, or its record in ``folder``."""
    record = folder / f"{name}-{seed}.json"
    what = [options.config, options.steps, options.warm_up, options.micro_batch, *options.overrides]
    if not record.exists():
        run = theirs(options, folder, seed) if name == "TRL" else ours(name, options, folder, seed)
        record.write_text(json.dumps({"of": what, "run": asdict(run)}), encoding="utf-8")
    recorded = json.loads(record.read_text(encoding="utf-8"))
    if recorded["of"] != what:
        raise SystemExit(f"{record} is of {recorded['of']}: give another --folder")
    run = Run(**recorded["run"])
    settled, last = median(run.settled(options.warm_up)), mean(run.rewards[-3:])
    print(f"{name}, seed {seed}: {settled:.2f} s a step, reward {run.rewards[0]:.3f} to {last:.3f}", flush=True)
    return run


def draw(runs: dict[str, list[Run]], samples: int, path: Path) -> None:
    """Reward against samples, and against time: each run thinly, the mean of the seeds in full."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    for name, own in runs.items():
        steps = range(1, len(own[0].rewards) + 1)
        step_s = median(value for run in own for value in run.step_s)
        for axis, unit in ((by_samples, float(samples)), (by_time, step_s / 60)):
            along = [unit * step for step in steps]
            for run in own:
                axis.plot(along, smooth(run.rewards, 3), color=COLOURS[name], alpha=0.3, linewidth=0.9)
            middle = smooth([mean(values) for values in zip(*(run.rewards for run in own), strict=True)], 3)
            axis.plot(along, middle, color=COLOURS[name], linewidth=2.2, label=LABELS.get(name, name))
    for axis, label in ((by_samples, "samples"), (by_time, "minutes, at the median step's time")):
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    by_samples.set_ylabel("mean reward (mean of 3 steps)")
    by_samples.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_smollm2.yaml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    if options.warm_up < 1:
        parser.error("--warm-up must be at least 1: the first step's time is not known")
    config: Config = load_config(options.config, [*FIXED, *options.overrides])
    if options.child:
        (seed,) = options.seeds
        run = train_with_trl(config, options.warm_up + options.steps, options.micro_batch, seed)
        options.child.write_text(json.dumps(asdict(run)), encoding="utf-8")
        return
    runs: dict[str, list[Run]] = {name: [] for name in COLOURS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            for name in COLOURS:
                runs[name].append(measured(name, options, folder, seed))
    samples = config.buffer.groups_per_step * config.rollout.group_size
    if options.plot:
        draw(runs, samples, options.plot)
    step_s = {name: [median(run.settled(options.warm_up)) for run in own] for name, own in runs.items()}
    of_trl = {
        arm: round(median(own / theirs for own, theirs in zip(step_s[arm], step_s["TRL"], strict=True)), 3)
        for arm in ("async", "sync")
    }
    result = {
        "config": options.config,
        "steps": options.steps,
        "samples_per_step": samples,
        "micro_batch": options.micro_batch,
        "step_s": {name: [round(value, 2) for value in values] for name, values in step_s.items()},
        "step_of_trl": of_trl,
        "limit": round(TIME_LIMIT, 3),
        "reward_last3": {name: [round(mean(run.rewards[-3:]), 4) for run in own] for name, own in runs.items()},
        "reward_all": {name: [round(mean(run.rewards), 4) for run in own] for name, own in runs.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
