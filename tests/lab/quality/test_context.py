"""Laws of the study of cached contexts: tasks are what they say, budgets are equal, summaries follow definitions."""

import numpy as np
import pytest
import torch
from lab.quality.context import BASELINES, TASKS, draw_questions, measure, summarise
from lab.quality.context_report import draw_tasks, markdown
from lab.training.reader import ReaderRecipe, untrained_reader

from foveate.apps.demo.facts import SENTENCE, VALUE
from foveate.apps.demo.lexicon import WORDS


@pytest.fixture(scope="module")
def model():
    model = untrained_reader(ReaderRecipe(layers=4, width=64)).double().eval()
    for weight in model.parameters():
        weight.data.mul_(2)  # attention far from even
    return model


@pytest.mark.parametrize("name", TASKS)
def test_the_fact_holds_the_answer_and_the_question_is_of_its_kind(name):
    task = TASKS[name]
    asked, again = draw_questions(task, 40), draw_questions(task, 40)
    assert all(torch.equal(a, b) for a, b in zip(asked, again, strict=True))
    values = asked.fact[:, VALUE]
    assert torch.equal(asked.ids.gather(1, values[:, None])[:, 0], asked.answers)
    starts = torch.tensor([start for start, _ in task.spans()])
    parts = asked.ids, asked.prompts, values.tolist(), asked.alike, asked.guess
    for ids, prompt, gold, alike, guess in zip(*parts, strict=True):
        words = [WORDS[token] for token in ids.tolist()]
        relation, subject = words[gold - 2], words[gold - 3]
        of_relation = [i for i in range(1, len(words), SENTENCE) if words[i + 1 : i + 3] == words[gold - 2 : gold]]
        assert sorted(set(alike.tolist())) == [row for i in of_relation for row in range(i, i + SENTENCE)]
        begins = int(starts[starts <= gold].max())
        asks = [WORDS[token] for token in prompt.tolist()]
        assert (relation in asks) == (name != "other words")
        assert asks.count("Let") == (3 if "starved" in name else 0)
        if name == "cut facts":
            assert gold - 3 < begins <= gold
        elif name != "one hop":
            home = words.index(subject, 0, gold - 3)  # where the id is told, in a chunk before
            assert words[home - 2 : home] == ["has", "id"]
            assert home < begins
            of_relation = [i for i in of_relation if words[i].isdigit() and i > home]
        said = [words[i + VALUE] for i in of_relation]  # by those that can be meant
        assert guess == pytest.approx(max(map(said.count, said)) / len(said))


def test_methods_recompute_equally_many_rows_and_all_of_them_is_the_full_prefill(model):
    task = TASKS["two hops"]
    asked = draw_questions(task, 4)
    cells = measure(model.double(), task.spans(), asked, [0.1, 1.0], batch=3)
    for name, (_, divergence, chosen, rows) in cells.items():
        if name.endswith("0.1"):
            assert rows.tolist() == [18.0] * 4
        elif name.endswith("1.0") or name in ("full", "the fact", "facts alike"):
            assert chosen.all()
        if name == "full" or (name.endswith("1.0") and "reorder" not in name):
            assert divergence.abs().max() < 1e-6
    assert cells["none"][1].min() > 1e-3


def made_up(**accuracy):
    """Cells of two readers and 500 questions with these parts answered rightly."""
    right = {name.replace("_", " "): np.arange(500)[None].repeat(2, 0) < 500 * part for name, part in accuracy.items()}
    return {name: np.stack([part, 1.0 - part, part, np.full((2, 500), 9.0)]) for name, part in right.items()}


def test_recovery_lies_between_none_and_full_and_a_task_without_gap_has_only_a_reason():
    names = *BASELINES, "InfoFlow", "InfoFlow boundary=1", "InfoFlow boundary=2"
    parts = 0.3, 0.4, 0.5, 0.35, 0.8, 0.7, 0.4
    cells = made_up(full=1.0, none=0.2, the_fact=0.9, facts_alike=0.95)
    cells |= {f"{name} 0.15": made_up(x=part)["x"] for name, part in zip(names, parts, strict=True)}
    guess = np.full(500, 0.2)
    found = summarise(cells, guess)
    assert found["gap"]["value"] == pytest.approx(0.8)
    assert found["cells"]["InfoFlow 0.15"]["recovered"]["value"] == pytest.approx(0.75)
    interval = found["cells"]["InfoFlow 0.15"]["accuracy"]
    assert interval["high"] - interval["low"] == pytest.approx(4 * (0.8 * 0.2 / 1000) ** 0.5, rel=0.15)
    assert found["margins"]["InfoFlow 0.15 - CacheBlend 0.15"]["value"] == pytest.approx(0.375)
    assert found["margins"]["InfoFlow boundary=2 0.15 - EPIC 0.15"]["value"] == pytest.approx(0.0, abs=1e-6)
    nothing = summarise(cells | made_up(none=0.95), guess)
    assert not nothing["separates"]
    assert set(nothing["cells"]) == {"full", "none"}
    tasks = {"gap": {"about": "one", **found}, "no": {"about": "two", **nothing}}
    text = markdown(tasks)
    assert "| InfoFlow | 0.75 [0.7" in text
    assert "**no** (two): no gap; full prefill 100.0%, none recomputed 95.0%, a guess 20.0%; readers that" in text
    assert len(draw_tasks(tasks).axes) == 1


@pytest.mark.parametrize(
    ("none", "guess", "said"),
    [
        (0.2, 0.2, ""),
        (0.45, 0.2, "no gap"),
        (0.2, 0.45, "the full prefill is no better than a guess"),
        (0.45, 0.45, "no gap and the full prefill is no better than a guess"),
    ],
)
def test_a_task_separates_only_where_the_full_prefill_beats_the_stale_cache_and_a_guess(none, guess, said):
    chances = np.linspace(0, 2 * guess, 500)
    task = summarise(made_up(full=0.5, none=none), chances)
    assert task["gap"]["value"] == pytest.approx(0.5 - none)
    assert task["lead"]["value"] == pytest.approx(0.5 - guess)
    assert task["lead"]["low"] < 0.5 - guess < task["lead"]["high"]
    assert (task["separates"], task["objection"], task["readers"]) == (not said, said, [not said] * 2)
    tasks = {"one": {"about": "", **task}}
    assert said in markdown(tasks)
    assert draw_tasks(tasks).get_suptitle() == (f"one: {said}" if said else "")


def test_readers_pass_or_fail_each_alone():
    cells = made_up(full=0.9, none=0.2)
    cells["none"][0, 1] = cells["full"][0, 1]  # what the second loses is nothing
    task = summarise(cells, np.full(500, 0.2))
    assert task["gap"]["value"] == pytest.approx(0.35)
    assert task["separates"]
    assert task["readers"] == [True, False]
    assert "readers that pass: 0 (of 2)" in markdown({"one": {"about": "", **task}})
