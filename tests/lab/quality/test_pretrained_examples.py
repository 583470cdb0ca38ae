"""Laws of the study of in-context examples with pretrained models: pools, hosts, baselines and summaries."""

import numpy as np
import pytest
import tiny_lm
import torch
from lab.quality.pretrained_examples import FOR_EACH_QUESTION, ONE_TEXT, Reader, answer, hosts, nearest, summarise
from lab.quality.pretrained_pools import Pool, draw_pool, labelled

from foveate.transformers.in_context import concatenate

LABELS = ["w50", "w51"]


def pool(examples=24, questions=3):
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(1, 40, (examples + questions, 3), generator=draw).tolist()
    texts = {" ".join(f"w{i}" for i in row): LABELS[row[0] % 2] for row in words}
    rows = torch.nn.functional.normalize(torch.randn(len(texts), 6, generator=draw), dim=1)
    return draw_pool(texts, rows, examples, len(texts) - examples, 0)


@pytest.mark.parametrize("data", ["questions", "reviews"])
def test_made_texts_have_one_label_and_enough_of_each(data):
    texts = labelled(data)
    assert texts == labelled(data)
    assert len(texts) > 500
    counts = [list(texts.values()).count(label) for label in set(texts.values())]
    assert min(counts) >= 10
    assert not any("{" in text for text in texts)
    with pytest.raises(ValueError, match="unknown data 'films'"):
        labelled("films")


def test_questions_are_no_examples():
    some = pool()
    assert not set(some.texts) & set(some.questions)
    assert (len(some.texts), len(some.embeddings)) == (24, 24)
    assert len(some.questions) == len(some.answers) == len(some.queries)
    with pytest.raises(ValueError, match="fewer than 30 examples and 1 questions"):
        draw_pool(dict.fromkeys("ab", "x"), torch.ones(2, 2), 30, 1, 0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_text_is_the_model_alone_and_questions_of_a_batch_do_not_meet(family):
    model, some = tiny_lm.language_model(family), pool()
    some = some._replace(questions=["w7", *some.questions[1:]])  # padded
    reader = Reader(model, tiny_lm.tokenizer(), LABELS)
    ids = [[0, 1], [2, 3]]
    found = hosts(reader, some, ids)
    told = [token for i in (0, 1, 2, 3) for token in reader.example(some.texts[i], some.labels[i])]
    for row, question in zip(found[ONE_TEXT], some.questions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*reader.start, *told, *reader.question(question).tolist()]])).logits[0, -1]
        assert torch.allclose(row, logits[reader.first].float().softmax(-1), atol=1e-5)
    for probabilities in found.values():
        assert torch.allclose(probabilities.sum(1), torch.ones(len(some.questions)))
    with pytest.raises(ValueError, match="begin with the same token"):
        Reader(model, tiny_lm.tokenizer(), ["w50", "w50 w1"])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_questions_with_their_own_examples_do_not_meet_in_a_batch(family):
    reader = Reader(tiny_lm.language_model(family), tiny_lm.tokenizer(), LABELS)
    told = [[5, 6, 7, 8], [9], [3] * 7]
    questions = [reader.question("w7 w8"), reader.question("w9"), reader.question("w1")]
    found = reader.each_with_its_own(told, questions)
    for row, before, question in zip(found, told, questions, strict=True):
        want = reader.probabilities(concatenate(reader.model, [[before]], reader.start), [question])[0]
        assert torch.allclose(row, want, atol=1e-5)


def test_the_nearest_examples_come_last():
    some = pool()
    for question, ids in zip(some.queries, nearest("nearest", some, 4), strict=True):
        similar = some.embeddings @ question
        assert ids[-1] == int(similar.argmax())
        assert similar[ids].tolist() == sorted(similar[ids].tolist())
    some = some._replace(questions=[some.texts[5], *some.questions[1:]])
    found = list(nearest("BM25", some, 4))
    assert found[0][-1] == 5
    assert all(len(set(ids)) == 4 for ids in found)


def test_methods_answer_and_summaries_are_paired_over_pools():
    reader, some = Reader(tiny_lm.language_model(max_position_embeddings=512), tiny_lm.tokenizer(), LABELS), pool()
    for method in ("random", "global_local", *FOR_EACH_QUESTION):
        accuracy = answer(reader, some, method, 0)
        assert all(0 <= value <= 1 for value in accuracy.values())
        assert (set(accuracy) == {ONE_TEXT}) == (method in FOR_EACH_QUESTION)
    draw = np.random.default_rng(0)
    lines = [
        {"data": "news", "pool": i, "method": method, "accuracy": {ONE_TEXT: float(draw.random())}}
        for i in range(5)
        for method in ("random", "nearest")
    ]
    rows = {row["method"]: row for row in summarise(lines[:-1])}  # the last pool is not complete
    gains = [lines[2 * i + 1]["accuracy"][ONE_TEXT] - lines[2 * i]["accuracy"][ONE_TEXT] for i in range(4)]
    assert rows["nearest"]["pools"] == 4
    assert rows["nearest"]["gain over random"][0] == pytest.approx(np.mean(gains), abs=1e-3)
    assert rows["random"]["gain over random"] == [0, 0, 0]
    assert isinstance(some, Pool)
