"""Laws of the reader's training: questions do not disturb each other, and an interrupted run resumes."""

import csv
import functools

import pytest
import torch
from accelerate.state import AcceleratorState
from lab.training import reader
from lab.training.reader import KINDS, ReaderRecipe, lesson, train_reader, untrained_reader
from transformers import AutoModelForCausalLM, AutoTokenizer

from foveate.apps.demo.facts import BLANK, SENTENCE, VALUE
from foveate.apps.demo.lexicon import WORDS

TINY = ReaderRecipe(layers=2, width=64, steps=4, batch=8, questions=2, sentences=(6, 12), easy=0.5)


@pytest.fixture(autouse=True)
def a_process_of_its_own():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_questions_do_not_attend_to_each_other():
    model = untrained_reader(TINY).double()
    taught = lesson(TINY, seed=3, sentences=6)
    at, seen = taught.places()
    with torch.no_grad():
        together = model(input_ids=taught.ids, position_ids=at[None], attention_mask=seen[None, None]).logits
        for number in range(TINY.questions):
            begin = taught.text + number * taught.question
            part = slice(begin, begin + taught.question)
            alone = model(input_ids=torch.cat([taught.ids[:, : taught.text], taught.ids[:, part]], 1)).logits
            torch.testing.assert_close(together[:, part], alone[:, taught.text :])
            torch.testing.assert_close(together[:, : taught.text], alone[:, : taught.text])


def test_every_other_head_of_an_untrained_reader_attends_to_equal_words():
    recipe = ReaderRecipe(width=128, layers=2)
    attention = untrained_reader(recipe).model.layers[1].self_attn
    words = torch.nn.functional.normalize(torch.randn(200, 128), dim=-1) * 128**0.5  # as a norm leaves them
    with torch.no_grad():
        queries = attention.q_proj(words).unflatten(1, (-1, 2, reader.HEAD_DIM))
        keys = attention.k_proj(words).unflatten(1, (-1, reader.HEAD_DIM))
        scores = torch.einsum("qghd,kgd->ghqk", queries, keys) / reader.HEAD_DIM**0.5
    alike = scores.diagonal(dim1=2, dim2=3).mean(-1)  # of each group its two heads
    torch.testing.assert_close(alike[:, 0], torch.full((2,), reader.LIKENESS), rtol=0.2, atol=0)
    assert (alike[:, 1].abs() < 0.5).all()
    assert (scores.mean((2, 3)).abs() < 0.2).all()


def test_easy_texts_use_names_only_to_define_ids():
    taught = lesson(TINY, seed=3, sentences=6, easy=True)
    texts = len(taught.ids) - round(TINY.labelled * TINY.batch)
    facts = taught.ids[:texts, 1 : taught.text].unflatten(1, (-1, SENTENCE))
    owners = taught.owners[:texts, 1 : taught.text].unflatten(1, (-1, SENTENCE))
    assert torch.equal(owners[..., 0], owners[..., VALUE])
    named = (facts[..., 0] == owners[..., 0]) & (owners[..., 0] != BLANK)
    assert (facts[named][:, 2] == WORDS.index("id")).all()
    told = owners[..., 0] != BLANK
    assert (told & ~named).sum() > named.sum()


def test_targets_are_the_next_tokens_and_the_persons_of_facts():
    taught = lesson(TINY, seed=3, sentences=6)
    rows, places = (taught.next != BLANK).nonzero().T
    assert (taught.ids[rows, places + 1] == taught.next[rows, places]).all()
    texts = len(taught.ids) - round(TINY.labelled * TINY.batch)
    answered = (taught.next[:, taught.text :] != BLANK).sum(1)
    assert (answered == 2 * TINY.questions).all()  # the answer and the end
    assert (taught.owners[texts:] == BLANK).all()
    names = {WORDS[token] for token in taught.owners[taught.owners != BLANK].tolist()}
    assert all(WORDS[token][0].isupper() for token in taught.ids[0, 1:2].tolist())
    assert len(names) > 2


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "accuracy", functools.partial(reader.accuracy, sentences=6, texts=8))
    assert train_reader(tmp_path / "whole", TINY)
    assert not train_reader(tmp_path / "broken", TINY, minutes=0)
    assert train_reader(tmp_path / "broken", TINY)
    whole, broken = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "reader") for name in ("whole", "broken"))
    for ours, theirs in zip(whole.parameters(), broken.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole" / "reader")
    assert tokenizer("Ada has id 17.").tokens() == ["<s>", "Ada", "has", "id", "17", "."]
    header, *lines = csv.reader((tmp_path / "broken" / "accuracy.csv").read_text().splitlines())
    assert header == ["step", *KINDS, "labels"]
    assert [line[0] for line in lines] == ["1", "4"]
    with pytest.raises(ValueError, match="multiple of 64, not 100"):
        ReaderRecipe(width=100)
    with pytest.raises(ValueError, match="name another folder"):
        train_reader(tmp_path / "whole", ReaderRecipe(layers=2, width=64, steps=5))
