"""Made-up run folders of any size, in the very lines that a run writes, for tests and benchmarks of what reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from forge_async.observability.run_folder import RunPaths

WORDS = ("the", "sum", "of", "two", "and", "three", "is", "five", "because", "we", "add", "them", "so", "=", "5", ".\n")
BEGAN = 1_700_000_000.0


def write_run(folder: Path, steps: int = 20, episodes_per_step: int = 4, tokens: int = 24, seed: int = 0) -> RunPaths:
    """A run of ``steps`` steps that is over, one second each, with one generator; every third episode saw a swap."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, draw = RunPaths(folder), random.Random(seed)
    paths.config.write_text(
        f"name: made_up\nsteps: {steps}\nmodel: {{path: models/made_up}}\nbuffer: {{max_staleness: 2}}\n"
    )
    with (
        paths.events.open("w") as events,
        paths.metrics.open("w") as metrics,
        paths.episodes.open("w") as episodes,
        paths.spans.open("w") as spans,
    ):

        def event(at: float, kind: str, **fields: object) -> None:
            _write(events, {"t": round(at - BEGAN, 6), "at": at, "kind": kind, **fields})

        def span(actor: str, lane: str, name: str, at: float, seconds: float, **args: int) -> None:
            _write(spans, {"actor": actor, "lane": lane, "name": name, "at": round(at, 6), "s": seconds, "args": args})

        event(BEGAN, "start", name=folder.name, resume=False)
        event(BEGAN + 0.5, "ready", seconds=0.5, version=0)
        for step in range(1, steps + 1):
            at = BEGAN + step
            reward = min(1.0, 0.2 + 0.7 * step / steps + draw.uniform(-0.1, 0.1))
            event(at, "step", index=step, version=step, reward=reward, staleness=step % 3)
            event(at + 0.1, "published", version=step, digest=f"{step:032x}", bytes=6_500_000, wall_s=0.05)
            pause = round(draw.uniform(0.3, 2.0), 3)
            event(at + 0.2, "swapped", replica=0, version=step, digest=f"{step:032x}", pause_ms=pause, in_flight=8)
            _write(metrics, {"step": step, "at": at, **_metrics(step, reward, draw)})
            for index in range(episodes_per_step):
                _write(episodes, _episode(step, index, tokens, draw))
            span("generator 0", "main", "generate", at, 0.6, version=step - 1)
            span("generator 0", "main", "swap", at + 0.6, pause / 1e3, version=step)
            span("generator 0", "main", "generate", at + 0.603, 0.39, version=step)
            span("generator 0", "weights", "pull", at + 0.4, 0.19, version=step)
            span("trainer 0", "main", "wait", at, 0.1)
            span("trainer 0", "main", "train", at + 0.1, 0.85, version=step - 1)
            span("trainer 0", "main", "publish", at + 0.95, 0.02, version=step)
            span("rewards", "worker 0", "reward", at + 0.5, 0.05)
        event(BEGAN + steps + 1, "end", outcome="finished")
    return paths


def _write(file: object, record: dict[str, object]) -> None:
    file.write(json.dumps(record) + "\n")  # type: ignore[attr-defined]


def _metrics(step: int, reward: float, draw: random.Random) -> dict[str, object]:
    keys = ("loss", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "entropy", "effective_sample_size")
    return {
        "reward": reward,
        "reward_parts/exact": reward,
        "staleness_mean": draw.uniform(0, 2),
        "staleness_max": step % 3,
        "staleness/histogram": [draw.randrange(100) for _ in range(3)],
        **{f"train/{key}": draw.random() for key in keys},
        **{f"time/{key}": draw.random() for key in ("step", "wait", "publish")},
        "train/trained_tokens": draw.randrange(1000),
        "tokens_per_s/generated": draw.uniform(200, 300),
        "tokens_per_s/trained": draw.uniform(200, 300),
        "buffer/ready": draw.randrange(16),
        "buffer/in_flight": draw.randrange(16),
        "buffer/uniform": draw.random(),
        "idle/trainer": draw.random() / 5,
        "idle/generator_0": draw.random() / 5,
    }


def _episode(step: int, index: int, tokens: int, draw: random.Random) -> dict[str, object]:
    pieces = [f" {draw.choice(WORDS)}" for _ in range(tokens)]
    cut = draw.randrange(1, tokens) if index % 3 == 0 else 0
    versions = [[step - 1, cut], [step, tokens - cut]] if cut else [[step, tokens]]
    logprobs = [round(-draw.expovariate(1.5), 5) for _ in pieces]
    reward = round(draw.random(), 3)
    return {
        "step": step,
        "episode_id": f"{step}-{index}.0",
        "reward": reward,
        "tokens": tokens,
        "oldest": versions[0][0],
        "newest": step,
        "prompt_id": f"{step}-{index}",
        "reward_parts": {"exact": reward},
        "group_reward_mean": 0.5,
        "group_rewards": [reward, round(1 - reward, 3)],
        "failed": 0,
        "task": "",
        "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
        "answer": "5",
        "turns": [
            {
                "completion": "".join(pieces),
                "tokens": tokens,
                "finish_reason": "stop",
                "versions": versions,
                "kv_versions": [[versions[0][0], tokens]],
                "mean_logprob": sum(logprobs) / tokens,
                "trained": [[0, 2], [1, tokens - 2]],
                "pieces": pieces,
                "logprobs": logprobs,
                "trainer_logprobs": [round(value + draw.uniform(-0.2, 0.2), 5) for value in logprobs],
                "reply": [],
            }
        ],
        "metadata": {},
    }
