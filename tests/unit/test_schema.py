"""What a mapping must look like to be read, and how its errors are named."""

from dataclasses import dataclass
from typing import Any

import pytest

from ddp_slurm.schema.fields import plain_text, positive_number, word
from ddp_slurm.schema.schema import Error, Invalid, Schema, key, mapping_of, tuple_of


@dataclass(frozen=True, init=False)
class Inner(Schema):
    low: int = key(positive_number)
    high: int = key(positive_number, 9)

    def misfits(self) -> list[Error]:
        return [(("high",), f"{self.high} is less than low")] if self.high < self.low else []


@dataclass(frozen=True, init=False)
class Outer(Schema):
    name: str | None = key(word, None)
    two_words: str = key(plain_text, "as is")
    inner: tuple[Inner, ...] = key(tuple_of(Inner.read), ())
    table: dict[str, int] = key(mapping_of(word, positive_number), {})


def test_values_defaults_and_what_was_given() -> None:
    read = Outer.read({"two-words": "a", "inner": [{"low": "3"}], "table": {"x": "1"}})
    assert read == Outer(two_words="a", inner=[Inner(low=3, high=9)], table={"x": 1})
    assert read.given == {"two_words", "inner", "table"}
    assert (read.name, Outer(name=None).name) == (None, None)
    assert Outer.read(read) is read
    changed = read.replaced(name="b")
    assert (changed.name, changed.inner, changed.given) == ("b", read.inner, read.given | {"name"})
    assert read.name is None
    with pytest.raises(AttributeError):
        read.name = "c"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "errors"),
    [
        (
            {"nmae": "x", "inner": [{}, {"low": "0"}]},
            [
                "nmae: unknown key; did you mean 'name'?",
                "inner[0].low: missing",
                "inner[1].low: 0 is too few; it must be 1 or more",
            ],
        ),
        ({"self": "x"}, ["self: unknown key; known are inner, name, table, two-words, two_words"]),
        ({"two_word": "x"}, ["two_word: unknown key; did you mean 'two_words'?"]),
        ({"two-word": "x"}, ["two-word: unknown key; did you mean 'two-words'?"]),
        (
            {"two-words": "x", "two_words": "y"},
            ["two_words: duplicate key, also written 'two-words'"],
        ),
        (
            {"two-words": "$(id)"},
            [
                "two-words: '$(id)' has a command substitution in it, "
                "which would not be run here; write its result, or use setup"
            ],
        ),
        ({"inner": [{"low": 5, "high": 4}]}, ["inner[0].high: 4 is less than low"]),
        (
            {"inner": [{"low": 5, "high": 4, "x": 1}]},
            ["inner[0].x: unknown key; known are high, low", "inner[0].high: 4 is less than low"],
        ),
        (
            {"inner": [{"low": "?", "high": 4}]},
            ["inner[0].low: '?' is not a whole number, such as 4"],
        ),
        ({"inner": {"low": 1}}, ["inner: expected a list, got a mapping"]),
        ({"inner": [[]]}, ["inner[0]: expected keys such as 'low:', got a list"]),
        ({"inner": [""]}, ["inner[0]: expected keys such as 'low:', got nothing"]),
        (
            {"table": {"a b": 1, "c": 0}},
            [
                "table.a b: 'a b' is not a plain word; letters, digits and _ . - + @ are accepted",
                "table.c: 0 is too few; it must be 1 or more",
            ],
        ),
        ({"table": []}, ["table: expected a mapping, got a list"]),
        ({"two_words": None}, ["two_words: expected a text, got nothing"]),
    ],
)
def test_all_errors_at_once(value: dict[str, Any], errors: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        Outer.read(value)
    assert str(caught.value) == "; ".join(errors)
