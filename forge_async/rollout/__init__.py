"""Prompt in, scored episode group out: datasets, rendering, environments, rewards, training sequences."""
