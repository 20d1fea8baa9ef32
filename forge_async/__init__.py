"""forge_async: asynchronous reinforcement learning for language models that never stops generating."""

from forge_async.types import (
    Completion,
    Episode,
    Group,
    Prompt,
    StepStats,
    TrainingSequence,
    Turn,
)

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Episode",
    "Group",
    "Prompt",
    "StepStats",
    "TrainingSequence",
    "Turn",
    "__version__",
    "launch",
]


def __getattr__(name: str):  # launch imports Monarch, which a plain `import forge_async.types` does not need
    if name == "launch":
        from forge_async.run import launch

        return launch
    raise AttributeError(f"module 'forge_async' has no attribute {name!r}")
