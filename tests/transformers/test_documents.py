"""Laws of documents and passages: nothing is lost or too long, and texts are split at the best boundary."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate.transformers.documents import read_documents, split_documents, split_text

TEXTS = st.text(st.sampled_from("ab. \n?"), max_size=80)


def words(text):
    return len(text.split())


@given(TEXTS, st.integers(1, 9), st.sampled_from([len, words]))
def test_parts_join_to_the_text_and_are_as_long_as_allowed(text, most, count):
    parts = split_text(text, most, count)
    assert "".join(parts) == text
    assert all(count(part) <= most for part in parts)
    assert all(count(one + other) > most for one, other in pairwise(parts))


def test_texts_are_split_after_paragraphs_then_sentences_then_words():
    text = "One two three. Four five.\n\nSix seven. Eight nine ten eleven twelve thirteen. End."
    assert split_text(text, 5, words) == [
        "One two three. Four five.\n\n", "Six seven. ", "Eight nine ten eleven twelve ", "thirteen. End."
    ]  # fmt: skip
    assert split_text("One two three. Four five six.", 4, words) == ["One two three. ", "Four five six."]
    assert split_text("abcdefgh", 3, len) == ["abc", "def", "gh"]


def test_passages_carry_the_name_of_their_document_and_end_with_an_empty_line():
    passages = split_documents({"a.txt": "one two. three four.", "b.txt": "five\n"}, 2, words)
    assert passages == [("a.txt, part 1", "one two.\n\n"), ("a.txt, part 2", "three four.\n\n"), ("b.txt", "five\n\n")]
    whole = split_documents({"a.txt": "one two. three four."}, 0, words)
    assert whole == [("a.txt", "one two. three four.\n\n")]


@given(st.text(st.sampled_from("ab. \n?"), max_size=60), st.integers(3, 12))
def test_passages_with_their_empty_line_fit_the_limit(text, most):
    passages = split_documents({"a.txt": text}, most, len)
    assert all(len(passage.text) <= most for passage in passages)
    assert "".join("".join(passage.text.split()) for passage in passages) == "".join(text.split())
    with pytest.raises(ValueError, match=r"passages of 2 tokens have no room .*: use 3 or more"):
        split_documents({"a.txt": text}, 2, len)


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
