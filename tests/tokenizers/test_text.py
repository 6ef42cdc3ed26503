from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3o_jax.tokenizers.text import PRINTABLE_ASCII, ByteTokenizer, CharTokenizer


def test_ids_are_positions_in_the_alphabet_after_the_end_of_sequence():
    tokenizer = CharTokenizer("abc")
    assert tokenizer.encode("cab") == [3, 1, 2]
    assert tokenizer.vocab_size == 4
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.bos_id is None


@given(st.text(alphabet=PRINTABLE_ASCII))
def test_text_survives(text):
    tokenizer = CharTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 < i < tokenizer.vocab_size for i in ids)


def test_default_alphabet_is_printable_ascii_with_newline_and_tab():
    assert set(PRINTABLE_ASCII) == {chr(c) for c in range(32, 127)} | {"\n", "\t"}


def test_end_of_sequence_decodes_to_nothing():
    assert CharTokenizer("ab").decode([0, 1, 0, 2, 0]) == "ab"


def test_unknown_character_is_named_with_its_position():
    with pytest.raises(ValueError, match=r"'é' at position 3 of 'café'"):
        CharTokenizer().encode("café")


@pytest.mark.parametrize("token", [-1, 3])
def test_id_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 3"):
        CharTokenizer("ab").decode([1, token])


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_alphabet_is_checked(alphabet):
    with pytest.raises(ValueError, match="alphabet"):
        CharTokenizer(alphabet)


def test_bytes_take_any_text():
    tokenizer = ByteTokenizer()
    for text in ("", "abc\n", "π ≈ 3.14 ✅\0"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([*ids, 255]) == text
        assert 255 not in ids  # the end of a sequence is no byte of a text
    assert tokenizer.decode([0xCF]) == "\ufffd"  # half a character
    with pytest.raises(ValueError, match=r"token ids \[256, -1\] are outside"):
        tokenizer.decode([1, 256, -1])
