"""Token ids of bad words."""

import pytest

from bateleur.runner.text.tokenizer import NoTokenizer, bad_words_token_ids

IDS = {"the": [5], " the": [6], "then": [5, 7], " then": [6, 7], "é": [90], " é": [1, 90], "\n": [3], "far": [8] * 9}
IDS |= {" far": [9, 8, 8], "foreign": [4], " foreign": [1, 100], "...": [], " ...": [1]}


class Fixed:
    """A tokenizer that knows a few texts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0, *IDS[text]] if add_special_tokens else IDS[text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        raise AssertionError


def words(*given: str, most: int = 100) -> tuple[tuple[int, ...], ...]:
    return bad_words_token_ids(given, Fixed(), 100, most)


def test_a_word_is_meant_with_and_without_a_space_before_it() -> None:
    assert words() == ()
    assert words("the") == words("  the") == words("the", "the") == ((5,), (6,))
    assert words("then", "é") == ((5, 7), (6, 7), (90,), (1, 90))
    assert words("\n") == ((3,),), "white space alone is what is meant"


def test_what_is_too_long_to_come_is_left_out() -> None:
    assert words("far", most=3) == ((9, 8, 8),)
    assert words("far", most=2) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("the", "..."), r"bad_words\[1\] is '...'; the tokenizer has no tokens for it"),
        (("foreign",), r"bad_words\[0\] is 'foreign', whose token is 100; the model has 100 tokens"),
    ],
)
def test_words_without_tokens_of_the_model_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        words(*given)


def test_without_a_tokenizer_there_are_no_words() -> None:
    assert bad_words_token_ids((), NoTokenizer(), 100, 5) == ()
    with pytest.raises(ValueError, match=r"^bad_words is \('a',\); it must be empty without a tokenizer$"):
        bad_words_token_ids(("a",), NoTokenizer(), 100, 5)
