"""Between rollout and trainer: a queue bounded by admission, gated by staleness, with a ledger of every prompt's
fate."""

from forge_async.buffer.buffer import PromptTooLong, RolloutBuffer
from forge_async.buffer.config import BufferConfig
from forge_async.buffer.ledger import Ledger, LedgerError

__all__ = ["BufferConfig", "Ledger", "LedgerError", "PromptTooLong", "RolloutBuffer"]
