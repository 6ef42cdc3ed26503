"""Text to token ids and back. Ids travel end to end: text is made for rewards and for people only."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

PRINTABLE_ASCII = "\n\t" + "".join(c for c in string.printable if c.isprintable())


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a response; the first is the one that demonstrations end with."""

    @property
    def bos_id(self) -> int | None:
        """The token that `encode` puts first; None: there is none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no end-of-sequence token is added."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; those that begin, end or pad a sequence give nothing."""


@dataclass(frozen=True)
class CharTokenizer:
    """One token a character, for small models; id 0 ends a sequence, and there is no padding token.

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """

    alphabet: str = PRINTABLE_ASCII
    """The characters, in the order of their ids 1, 2, ..."""

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet must be characters without repetition, got {self.alphabet!r}")

    @property
    def vocab_size(self) -> int:
        """The alphabet and the end-of-sequence token."""
        return len(self.alphabet) + 1

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Always (0,)."""
        return (0,)

    @property
    def bos_id(self) -> None:
        """Always None."""
        return None

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self.alphabet, start=1)}

    def encode(self, text: str) -> list[int]:
        """One id a character.

        Raises:
            ValueError: a character that is not in the alphabet, with its position.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"character {character!r} at position {text.index(character)} of {text!r} is not in the tokenizer's "
                "alphabet"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """One character an id; the end-of-sequence token gives nothing.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        characters = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
            characters.append(self.alphabet[i - 1] if i else "")
        return "".join(characters)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte of UTF-8, for small models on any text; the byte 255, which no text has, ends a sequence."""

    @property
    def vocab_size(self) -> int:
        """All bytes."""
        return 256

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Always (255,)."""
        return (255,)

    @property
    def bos_id(self) -> None:
        """Always None."""
        return None

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 give the replacement character, the end of a sequence nothing.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        kept = [i for i in ids if i != 255]
        if any(not 0 <= i < 256 for i in kept):
            raise ValueError(f"token ids {[i for i in kept if not 0 <= i < 256]} are outside the vocabulary of 256")
        return bytes(kept).decode(errors="replace")


class TextStream:
    """Text as its tokens come, of which one may be part of a character: every piece is valid by itself."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # since the last place but one where a character ended
        self._given = ""  # of their text

    def push(self, token: int) -> str:
        """What text the token completes; empty where it ends within a character."""
        before = len(self._ids)
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip("\ufffd")  # what is broken so far may yet be completed
        piece = whole[len(self._given) :]
        self._given += piece
        if piece and whole == text and before:
            # The last token stays, for tokenizers whose text depends on what is before.
            self._ids, self._given = self._ids[before:], self._tokenizer.decode(self._ids[before:])
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._tokenizer.decode(self._ids)[len(self._given) :]
