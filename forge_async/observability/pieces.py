"""The text of single tokens, so that a completion can be shown token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no whole character."""


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Pieces:
    """Cuts completions into their tokens' texts; an id is decoded once, whatever the number of completions."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: Sequence[int], text: str) -> list[str]:
        """One text per token; together they are ``text``, which all of them decode to.

        Of a character that is made by several tokens the last one has the text, the others have "".
        """
        pieces = [self._alone(token) for token in token_ids]
        if pieces and not text.startswith(pieces[0]):
            pieces[0] = pieces[0].lstrip()  # some decoders leave the space before the first word out
        return pieces if "".join(pieces) == text else self._one_after_another(token_ids, text)

    def _alone(self, token: int) -> str:
        """What a token adds to one before it: alone, some decoders drop its leading space."""
        piece = self._known.get(token)
        if piece is None:
            once = self._tokenizer.decode([token])
            piece = self._known[token] = self._tokenizer.decode([token, token])[len(once) :]
        return piece

    def _one_after_another(self, token_ids: Sequence[int], text: str) -> list[str]:
        """Decodes a window that grows until it ends with a whole character, then moves on."""
        pieces, start, end, done = [], 0, 0, 0
        for index in range(1, len(token_ids) + 1):
            before = self._tokenizer.decode(token_ids[start:end])
            now = self._tokenizer.decode(token_ids[start:index])
            piece = ""
            if len(now) > len(before) and not now.endswith(UNFINISHED):
                piece = now[len(before) :]
                start, end = end, index
            done += len(piece)
            pieces.append(piece)
        if pieces:
            pieces[-1] += text[done:]
        return pieces
