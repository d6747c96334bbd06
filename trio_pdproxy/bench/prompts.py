"""Prompts of a wanted number of tokens, without a tokenizer: the engine says how many tokens a text has."""

from __future__ import annotations

from random import Random

WORDS = (
    *("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his"),
    *(
        "they",
        "at",
        "be",
        "this",
        "have",
        "from",
        "or",
        "one",
        "had",
        "by",
        "word",
        "but",
        "not",
        "what",
        "all",
        "were",
    ),
    *("when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "will", "up"),
    *("other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make", "like", "into"),
    *("time", "look", "two", "more", "write", "go", "see", "number", "no", "way", "could", "people", "my", "than"),
)


def random_text(random: Random, length: int) -> str:
    """About `length` characters of random words: no two alike, so that no prefix cache has met one before."""
    words: list[str] = []
    left = length
    while left > 0:
        words.append(random.choice(WORDS))
        left -= len(words[-1]) + 1
    return " ".join(words)[: max(length, 1)]


def characters_for(tokens: int, short: tuple[int, int], long: tuple[int, int]) -> int:
    """How long a text has to be for a prompt of `tokens`, going by two that were counted: (characters, tokens) each.

    Two, because a chat template adds the same to each.
    """
    per_token = (long[0] - short[0]) / max(long[1] - short[1], 1)
    return max(1, round(short[0] + (tokens - short[1]) * per_token))
