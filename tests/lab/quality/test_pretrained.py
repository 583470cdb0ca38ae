"""Laws of the study of pretrained models: what is asked is in the text, measures follow definitions, runs continue."""

import random

import numpy as np
import pytest
import tiny_lm
import torch
from lab.quality import pretrained, pretrained_questions
from lab.quality.pretrained import BOUNDARY, MEASURES, VARIANTS, interval, measure, policies, read, run, summarise
from lab.quality.pretrained_questions import KINDS, Question, Text, documentation, draw_news, draw_text

LAYERS = ["full_attention"] * 4
TEXT = Text(
    tiny_lm.DOCUMENTS, [Question(kind, prompt, "w5 w6") for kind, prompt in zip(KINDS, tiny_lm.PROMPTS, strict=False)]
)


def length(text):
    return len(text) // 4


def paragraphs():
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "omega"]
    sentences = [" ".join(draw.choices(words, k=9)).capitalize() + "." for _ in range(600)]
    return [" ".join(sentences[i : i + 3]) for i in range(0, 600, 3)]


@pytest.mark.parametrize("number", range(3))
def test_facts_are_where_their_kind_says(number):
    text = draw_text(number, paragraphs(), 1024, 128, length)
    assert text == draw_text(number, paragraphs(), 1024, 128, length)
    assert len(text.chunks) == 8
    single, cut, hops, needles = text.questions
    assert [question.kind for question in text.questions] == list(KINDS[:4])
    whole = [chunk for chunk in text.chunks if f"{single.prompt.rpartition('Answer: ')[2]}{single.answer}." in chunk]
    assert len(whole) == 1
    begins = [i for i, chunk in enumerate(text.chunks) if chunk.endswith("The number of the green locker is")]
    assert text.chunks[begins[0] + 1].startswith(f"{cut.answer}.")
    thing = hops.prompt.partition("whom the ")[2].partition(" was")[0]
    (lent,) = (i for i, chunk in enumerate(text.chunks) if f"The {thing} was lent to" in chunk)
    keeper = text.chunks[lent].partition(f"The {thing} was lent to ")[2].partition(".")[0]
    (told,) = (i for i, chunk in enumerate(text.chunks) if f"number of {keeper} is{hops.answer}." in chunk)
    assert 0 < lent < told
    assert " ".join(text.chunks).count("The magic number of the") == 8
    assert f"{needles.prompt.rpartition('Answer: ')[2]}{needles.answer}." in " ".join(text.chunks)
    assert not any(question.answer in text.chunks[0] for question in text.questions)


def test_news_are_asked_about_names_and_numbers_of_first_sentences(monkeypatch):
    body = "The old mayor of this small town in the north met Ada Brown on Monday. " + "It rained all day. " * 30
    articles = {
        f"class {i}": [f"Headline {i}\n\n{body.replace('Ada', name)}"]
        for i, name in enumerate(["Ada", "Bo", "Cy", "Di", "Ed"])
    }
    monkeypatch.setattr(pretrained_questions, "bbc_articles", lambda: articles)
    text = draw_news(0, 500, length)
    assert len(text.chunks) == 5
    assert all(length(chunk) <= 101 for chunk in text.chunks)
    for chunk, question in zip(text.chunks[1:], text.questions, strict=True):
        headline, _, story = chunk.partition("\n")
        assert f"'{headline}'" in question.prompt
        assert story.startswith(question.prompt.partition("Answer: ")[2] + question.answer)


def test_longer_texts_have_more_articles_and_as_many_questions(monkeypatch):
    body = "The old mayor of this small town in the north met Ada Brown on Monday. " + "It rained all day. " * 400
    articles = {f"class {i}": [f"Headline {i}.{j}\n\n{body}" for j in range(3)] for i in range(5)}
    monkeypatch.setattr(pretrained_questions, "bbc_articles", lambda: articles)
    text = draw_news(0, 15872, length)
    headlines = [chunk.partition("\n")[0] for chunk in text.chunks]
    assert len(set(headlines)) == 10
    assert [question.prompt.split("'")[1] for question in text.questions] == headlines[2::2]
    assert 15000 < sum(map(length, text.chunks)) <= 15880


def test_documentation_is_prose_and_is_kept(tmp_path):
    found = documentation(tmp_path)
    assert len(found) > 100
    assert all(text[0].isupper() and text[-1] == "." for text in found)
    (tmp_path / "documentation.json").write_text('["One."]')
    assert documentation(tmp_path) == ["One."]


def test_all_rows_are_the_full_prefill_and_measures_follow_their_definitions():
    encoder = tiny_lm.encoder("gemma3")
    names = ["full", *(f"{name} 1.0" for name in policies(1.0, 0, LAYERS) if name != "reorder"), "none", "EPIC 0.2"]
    found = dict(measure(encoder, TEXT, names, 0))
    context = encoder.compose(encoder.encode(TEXT.chunks))
    answer = encoder.tokens("w5 w6")
    for i, question in enumerate(TEXT.questions):
        want = tiny_lm.full_logits(encoder, context, question.prompt + " w5 w6")[-3:-1].log_softmax(-1)
        assert found["full"][i]["nll"] == pytest.approx(-float(want.gather(1, answer[:, None]).mean()), abs=1e-4)
        assert found["full"][i]["right"] == float((want.argmax(-1) == answer).all())
        for name in names:
            got = found[name][i]
            if name.endswith("1.0"):
                assert got["divergence"] < 1e-6
                assert got["nll"] == pytest.approx(found["full"][i]["nll"], abs=1e-5)
        assert (found["none"][i]["rows"], found["EPIC 0.2"][i]["rows"]) == (0, len(context) // 5)
        assert found["none"][i]["divergence"] > 1e-3
    (_, again), (_, epic) = measure(encoder, TEXT, ["EPIC 0.2"], 0, runs=2)
    assert len(again) == len(epic) == len(TEXT.questions)
    assert [{**one, "seconds": 0} for one in epic] == [{**one, "seconds": 0} for one in found["EPIC 0.2"]]


def test_variants_are_those_that_can_be_left_out():
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    assert set(VARIANTS) <= set(policies(0.15, 0, 3 * layers))
    assert "full-attention layers" not in policies(0.15, 0, LAYERS)
    assert policies(0.15, 0, 3 * layers)["full-attention layers"].scoring_layers == (11,)
    assert policies(0.15, 0, LAYERS)[f"boundary={BOUNDARY}"].boundary == BOUNDARY


def test_an_interrupted_run_continues_with_what_is_missing(monkeypatch, tmp_path):
    calls = []

    def measured(encoder, text, names, seed, runs):
        calls.append((seed, names))
        for name in dict.fromkeys(["full", *names]):
            yield name, [dict.fromkeys(MEASURES, 1.0) for _ in text.questions]

    monkeypatch.setattr(pretrained, "measure", measured)
    path, encoder = tmp_path / "a.jsonl", tiny_lm.encoder()
    monkeypatch.setattr(pretrained, "draw_text", lambda number, *arguments: TEXT)
    arguments = encoder, path, [], 2
    run(*arguments, ["full", "none"], 1024, lambda *some: lambda: None)
    lines = path.read_text().splitlines(keepends=True)
    assert calls == [(0, ["full", "none"]), (10, ["full", "none"])]
    path.write_text("".join(lines[:3]) + lines[3][:9])
    assert len(read(path)) == 3
    run(*arguments, ["full", "none"], 1024, lambda *some: lambda: None)
    assert calls[2:] == [(10, ["none"])]
    assert path.read_text() == "".join(lines)


def test_summaries_compare_methods_over_the_same_questions():
    draw = np.random.default_rng(0)
    of_a_budget = "InfoFlow KV 0.1", "EPIC 0.1", "reorder 0.1", "hl-tp 0.1", "EPIC 0.3", "InfoFlow KV 0.3"
    methods = "full", "none", *of_a_budget
    lines = [
        {"text": text, "method": method, "kinds": ["a fact", "single fact"]}
        | {key: draw.normal(size=2).tolist() for key in MEASURES}
        for text in range(6)
        for method in methods
        if (text, method) not in [(5, "EPIC 0.1"), (0, "reorder 0.1"), *((n, "hl-tp 0.1") for n in range(1, 6))]
    ]
    rows = {(row["method"], row["budget"], row["kind"]): row for row in summarise(lines)}
    assert {kind for _, _, kind in rows} == {"all", "single fact"}
    row = rows["EPIC", "0.1", "single fact"]
    assert (row["texts"], row["questions"]) == (5, 5)
    assert (rows["full", "0.3", "all"]["texts"], rows["full", "0.3", "all"]["questions"]) == (6, 12)
    assert [rows[variant, "0.1", "all"]["texts"] for variant in ("reorder", "hl-tp")] == [4, 1]
    of = {(line["text"], line["method"]): line["nll"][1] for line in lines}
    differences = [of[text, "EPIC 0.1"] - of[text, "InfoFlow KV 0.1"] for text in range(5)]
    mean, low, high = row["nll minus InfoFlow KV"]
    assert mean == pytest.approx(np.mean(differences), abs=1e-4)
    assert min(differences) <= low < mean < high <= max(differences)
    assert interval([np.ones((2, 1)), np.zeros((1, 1))], 0)[0] == pytest.approx(2 / 3, abs=1e-4)
    assert torch.tensor(row["right"]).isfinite().all()
