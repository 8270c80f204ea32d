from pathlib import Path

import pytest

from tierkv.demo.text import Tokens, filler_prompt, library_text, prompt_of


@pytest.fixture(scope="module")
def tokens(smollm2_folder: Path) -> Tokens:
    return Tokens(smollm2_folder)


def test_text_is_long_enough_for_every_prompt(tokens: Tokens):
    assert len(tokens.encode(library_text())) > 60_000


@pytest.mark.parametrize("wanted", [64, 1024, 4096])
def test_prompt_has_the_wanted_length(tokens: Tokens, wanted: int):
    prompt = prompt_of(tokens, wanted)
    assert prompt.tokens == len(tokens.encode(prompt.text))
    assert abs(prompt.tokens - wanted) <= 3


def test_longer_prompt_begins_with_the_same_tokens(tokens: Tokens):
    prompt = prompt_of(tokens, 512)
    ids, longer = tokens.encode(prompt.text), tokens.encode(prompt.longer)
    assert longer[: len(ids)] == ids
    assert len(longer) - len(ids) == prompt.added_tokens
    assert 28 <= prompt.added_tokens <= 34


def test_prompts_with_other_skips_differ_from_their_first_word(tokens: Tokens):
    one, other = (tokens.encode(prompt_of(tokens, 256, skip).text) for skip in (0, 5000))
    same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert same <= 4


@pytest.mark.parametrize("wanted", [0, 5, 10_000_000])
def test_impossible_length_is_refused(tokens: Tokens, wanted: int):
    with pytest.raises(ValueError, match=f"not {wanted}"):
        prompt_of(tokens, wanted)


def test_fillers_are_too_short_to_be_stored(tokens: Tokens):
    # min_store_tokens is 64 by default.
    assert all(len(tokens.encode(filler_prompt(n))) < 40 for n in (0, 9, 1234567))
