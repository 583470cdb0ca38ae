"""Laws of documents and passages: nothing is lost or too long, and texts are split at the best boundary."""

import json
import re
from base64 import b64encode
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from foveate.transformers.documents import Passage, split_documents, split_text
from foveate.transformers.readers import read_documents

TEXTS = st.text(st.sampled_from("ab. \n?"), max_size=80)


def words(text):
    return [match.span() for match in re.finditer(r"\S+", text)]


def characters(text):
    return [(i, i + 1) for i in range(len(text))]


@given(TEXTS, st.integers(1, 9), st.sampled_from([characters, words]))
def test_parts_join_to_the_text_and_are_as_long_as_allowed(text, most, spans):
    parts = split_text(text, most, spans)
    assert "".join(parts) == text
    assert all(len(spans(part)) <= most for part in parts)
    assert all(len(spans(one + other)) > most for one, other in pairwise(parts))


@cache
def byte_tokenizer():
    """A tokenizer like that of GPT-2, trained on this folder's tests. Other letters are tokens of single bytes."""
    rules = Tokenizer(BPE())
    rules.pre_tokenizer = ByteLevel(add_prefix_space=False)
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))[:4]]
    rules.train_from_iterator(
        texts, BpeTrainer(vocab_size=800, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    return rules


def byte_spans(text):
    return byte_tokenizer().encode(text).offsets


RANDOM = Random(0)
STRANGE = {
    "base64": b64encode(RANDOM.randbytes(30_000)).decode(),
    "JSON": json.dumps([{"id": i, "name": f"user{i}", "score": RANDOM.random()} for i in range(600)]).replace(" ", ""),
    "Thai": "".join(RANDOM.choice(["ประภาคาร", "ถูกสร้าง", "ขึ้นใน", "ปี"]) for _ in range(3000)),
    "one letter": "x" * 40_000,
    "spaces": " " * 20_000 + "x" + "\n" * 20_000,
    "no full stops": "assert the tests of this folder " * 800,
    "emoji": "\U0001f34e\U0001f469\u200d\U0001f680 " * 2000,
    "prose": Path(__file__).read_text() * 4,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_any_text_is_tokenized_about_twice(kind):
    """Once whole, and once in parts; a part may be tokenized again if it alone has more tokens than in the text."""
    text, calls = STRANGE[kind], []

    def counted(text):
        calls.append(len(text))
        return byte_spans(text)

    parts = split_text(text, 64, counted, "\n\n")
    assert "".join(parts) == text
    tokens = [len(byte_spans(part.strip() + "\n\n")) for part in parts]
    assert max(tokens) <= 64
    assert kind == "spaces" or sum(tokens) / len(tokens) > 40
    assert sum(calls) <= 2.3 * len(text)
    assert len(calls) <= 1.3 * len(parts) + 2


def test_parts_fit_even_if_tokens_depend_on_what_is_cut_off():
    def spans(text):  # a text alone has twice as many tokens as in a longer one
        return sorted(characters(text) * (2 if len(text) < 1000 else 1))

    calls, text = [], "a" * 4000
    parts = split_text(text, 100, lambda part: (calls.append(len(part)), spans(part))[1])
    assert "".join(parts) == text
    assert {len(part) for part in parts[:-1]} == {50}
    assert sum(calls) < 6 * len(text)


def test_a_character_with_too_many_tokens_is_a_part():
    assert split_text("a\U0001f34eb", 2, byte_spans) == ["a", "\U0001f34e", "b"]


def test_texts_are_split_after_paragraphs_then_sentences_then_words():
    text = "One two three. Four five.\n\nSix seven. Eight nine ten eleven twelve thirteen. End."
    assert split_text(text, 5, words) == [
        "One two three. Four five.\n\n", "Six seven. Eight nine ten ", "eleven twelve thirteen. End."
    ]  # fmt: skip
    assert split_text("One two three. Four five six.", 4, words) == ["One two three. ", "Four five six."]
    assert split_text("Title\n\nOne two. Three four.", 3, words) == ["Title\n\nOne two. ", "Three four."]
    assert split_text("abcdefgh", 3, characters) == ["abc", "def", "gh"]


def test_passages_carry_the_name_of_their_document_and_end_with_an_empty_line():
    passages = split_documents({"a.txt": "one two. three four.", "b.txt": "five\n"}, 2, words)
    parts = ("a.txt, part 1", "one two.\n\n"), ("a.txt, part 2", "three four.\n\n"), ("b.txt", "five\n\n")
    assert passages == [Passage(*part) for part in parts]
    whole = split_documents({"a.txt": "one two. three four."}, 0, words)
    assert whole == [Passage("a.txt", "one two. three four.\n\n")]


@given(st.text(st.sampled_from("ab. \n?"), max_size=60), st.integers(3, 12))
def test_passages_with_their_empty_line_fit_the_limit(text, most):
    passages = split_documents({"a.txt": text}, most, characters)
    assert all(len(passage.text) <= most for passage in passages)
    assert "".join("".join(passage.text.split()) for passage in passages) == "".join(text.split())
    with pytest.raises(ValueError, match=r"passages of 2 tokens have no room .*: use 3 or more"):
        split_documents({"a.txt": text}, 2, characters)


def test_a_folder_is_read_with_subfolders_and_without_hidden_files(tmp_path):
    for name, content in {"b.md": b"two", "a.txt": b"\xef\xbb\xbfone", "in/c.RST": b"three", "d.png": b"\xff",
                          ".git/e.txt": b"x", "in/.f.txt": b"x"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_documents(tmp_path) == {"a.txt": "one", "b.md": "two", "in/c.RST": "three"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n", "a.txt is empty"), (b"\xff\xfe", "a.txt is not UTF-8 text"), (None, "has no .txt")],
)
def test_unreadable_files_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match=r"none is not a folder"):
        read_documents(tmp_path / "none")
