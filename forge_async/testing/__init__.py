"""Helpers for tests: tiny models, made once per test session."""
