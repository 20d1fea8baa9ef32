"""Texts of single tokens join to the completion, whatever the tokenizer does at word and character borders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forge_async.observability.pieces import Pieces


class Words:
    """As SentencePiece decoders do: a space before each word, but not before the first."""

    words = ("foo", "bar", "baz")

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.calls += 1
        return " ".join(self.words[i] for i in token_ids)


class Bytes:
    """As byte-level decoders do: a token is a byte, which may be a part of a character."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_words_have_their_leading_space_and_are_decoded_once() -> None:
    tokenizer = Words()
    pieces = Pieces(tokenizer)
    assert pieces.of([0, 1, 0], "foo bar foo") == ["foo", " bar", " foo"]
    calls = tokenizer.calls
    assert pieces.of([1, 0, 1], "bar foo bar") == ["bar", " foo", " bar"]
    assert tokenizer.calls == calls


@pytest.mark.parametrize("text", ["naïve", "日本語 ok", "a😀b", "x"])
def test_the_last_token_of_a_character_has_it(text: str) -> None:
    ids = list(text.encode())
    pieces = Pieces(Bytes()).of(ids, text)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    shown = [piece for piece in pieces if piece]
    assert shown == list(text)


@pytest.mark.parametrize("ids", [[0xE6], [0x61, 0xFF, 0x62], [0xE6, 0x97, 0x61, 0xA5], []])
def test_bytes_that_are_no_text_lose_nothing(ids: list[int]) -> None:
    text = Bytes().decode(ids)
    pieces = Pieces(Bytes()).of(ids, text)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
