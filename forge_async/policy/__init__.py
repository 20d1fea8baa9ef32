"""The policy service: vLLM replicas that generate without pause while their weights are replaced."""

from forge_async.policy.config import PolicyConfig, SamplingConfig, UpdateConfig

__all__ = ["PolicyConfig", "SamplingConfig", "UpdateConfig"]
