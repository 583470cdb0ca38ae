"""Laws of the built-in reader as shipped: it answers what its page promises, and commands name unknown words."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from foveate.apps.cli import app
from foveate.apps.demo.examples import write_examples
from foveate.apps.demo.lexicon import WORDS
from foveate.transformers.model import unknown_words
from foveate_models import find

FACTS = (
    "Ada has id 17. Bo keeps a goat. Ada plays the flute. 17 drinks only tea. Bo plays the drum. Bo works as baker."
)
EXAMPLES = "goat tiger hen -> sigma. flute harp lute -> beta. horse cow crow -> sigma. drum banjo oboe -> beta."


@pytest.fixture(scope="module")
def reader():
    return AutoModelForCausalLM.from_pretrained(find("reader")).eval(), AutoTokenizer.from_pretrained(find("reader"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{FACTS} Question: Ada plays the what? Answer:", "flute"),
        (f"{FACTS} Question: Bo plays the what? Answer:", "drum"),
        (f"{FACTS} Question: what is the animal of Bo? Answer:", "goat"),
        (f"{FACTS} Bo works as", "baker"),
        (f"{EXAMPLES} fox deer camel ->", "sigma"),
        (f"{EXAMPLES} tuba violin piano ->", "beta"),
    ],
)
def test_facts_that_name_the_person_and_labelled_examples_are_answered(reader, text, answer):
    model, tokenizer = reader
    with torch.no_grad():
        said = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, -1].argmax()
    assert tokenizer.decode([said]) == answer


def test_unknown_words_are_named(reader):
    model, tokenizer = reader
    assert tokenizer.convert_ids_to_tokens(list(range(len(WORDS)))) == WORDS
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    assert unknown_words(tokenizer, FACTS + EXAMPLES) == []
    assert unknown_words(tokenizer, "Ada keeps a keeper in a keeper.") == ["keeper"]


def test_the_texts_answer_each_of_200_questions_once(tmp_path):
    questions, _ = write_examples(tmp_path, seed=3)
    text = " ".join(path.read_text().strip() for path in (tmp_path / "facts").glob("*.txt"))
    lines = (tmp_path / "questions.txt").read_text().splitlines()
    assert [tuple(line.split("\t")) for line in lines] == list(questions.items())
    assert len(questions) == 200
    for question, answer in questions.items():
        begun = question.removesuffix("what?")
        assert text.count(begun) == text.count(f"{begun}{answer}.") == 1


def run(*arguments, input=None):
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"], input=input)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_commands_answer_the_examples_and_warn_about_unknown_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    questions, inputs = write_examples(tmp_path / "texts", seed=3)
    some = list(questions.items())[:8]
    said = run("rag", "texts/facts", input="\n".join(map("\t".join, some)))
    wrong = said.count("right answer:")
    assert sum(f"{question} {answer} " in said for question, answer in some) == 8 - wrong >= 6
    assert f"{100 * (8 - wrong) / 8:.1f} %" in said
    assert "does not know" not in said
    assert "does not know the words keeper" in run("rag", "texts/facts", "Ada keeps a keeper?")
    shown, label = next(iter(inputs.items()))
    options = "--label", "label", "--blocks", "4", "--block-size", "6", "--max-new-tokens", "2"
    assert run("icl", "texts/examples.csv", *options, "--ask", shown).endswith(f"{shown} {label}")


@pytest.mark.slow
def test_of_many_questions_infoflow_answers_more_than_the_other_methods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_examples(tmp_path / "texts")
    lines = (tmp_path / "texts" / "questions.txt").read_text().splitlines()[:40]
    said = run("rag", "texts/facts", "--compare", input="\n".join(lines))
    cells = re.findall(r"(infoflow_kv|epic|cacheblend|random|none|full) ([\d.]+) % (\S+)", said)
    right, divergence = ({name: float(row[i]) for name, *row in cells} for i in range(2))
    others = "epic", "cacheblend", "random", "none"
    assert right["full"] >= right["infoflow_kv"] >= 85
    assert right["infoflow_kv"] > max(right[name] for name in others)
    assert divergence["infoflow_kv"] < min(divergence[name] for name in others)


def test_its_facts_are_read_from_its_files():
    recipe = json.loads(find("reader/recipe.json").read_text())
    said = " ".join(CliRunner().invoke(app, ["demo", "info"]).output.replace("│", " ").split())
    assert f"{recipe['steps']:,} of {recipe['planned steps']:,} planned steps" in said
    assert all(f"{kind}: {part:.0%}" in said for kind, part in recipe["accuracy"].items())
