"""Real prose of a wanted length: the reference texts about the language that every Python installation brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# In this order; the rest of the topics follow by name when more is asked for.
_FIRST = ("execmodel", "types", "specialnames", "compound", "typesseq", "assignment", "formatstrings")
_OPENING = "<|im_start|>user\n"
# A small model can answer this, and only from what it was given: from the state that came back.
_QUESTION = (
    "\n\nThe secret word of this text is tangerine. What is the secret word of this text?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
# What a next turn adds to a prompt that is already known.
_ADDED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document with a question, and the same text with ``added_tokens`` tokens more behind it."""

    text: str
    longer: str
    tokens: int
    added_tokens: int


class Tokens:
    """A model folder's tokenizer, without the engine: counts and cuts."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def library_text() -> str:
    """About 450,000 characters of prose from the running Python's own reference."""
    from pydoc_data.topics import topics

    names = [name for name in _FIRST if name in topics] + sorted(set(topics) - set(_FIRST))
    return "\n\n".join(topics[name].strip() for name in names)


def prompt_of(tokens: Tokens, wanted: int, skip: int = 0) -> Prompt:
    """A prompt of ``wanted`` tokens, give or take two where a cut falls inside a word.

    ``skip`` is how many tokens of the text are passed over first: prompts with other skips share nothing but their
    opening. Raises ValueError when ``wanted`` is too small for the question or larger than the text.
    """
    text = tokens.encode(library_text())
    room = wanted - len(tokens.encode(_OPENING)) - len(tokens.encode(_QUESTION))
    if room < 1 or skip + room + _ADDED_TOKENS > len(text):
        raise ValueError(f"a prompt has {wanted - room + 1} to {wanted - room + len(text) - skip} tokens, not {wanted}")
    end = skip + room
    first = f"{_OPENING}{tokens.decode(text[skip:end]).strip()}{_QUESTION}"
    longer = first + tokens.decode(text[end : end + _ADDED_TOKENS]).strip()
    count = len(tokens.encode(first))
    return Prompt(first, longer, count, len(tokens.encode(longer)) - count)


def filler_prompt(number: int) -> str:
    """A short prompt (under 32 tokens) that pushes older ones out of a small prompt cache.

    It shares no first token with ``prompt_of``: the engine must not find even the opening of a cold prompt.
    """
    return f"Say the number {number}.<|im_end|>\n<|im_start|>assistant\n"
