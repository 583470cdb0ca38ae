"""Laws of the texts whose facts take one token each, and of those who read them."""

from itertools import pairwise

import pytest
import torch
from lab.quality.context import measure
from lab.quality.one_row import (
    FIRST,
    KINDS,
    PEOPLE,
    RELATIONS,
    SIZES,
    SPANS,
    TASKS,
    Reader,
    Recipe,
    composition,
    draw_questions,
    reader,
    token,
)

from foveate.utils.progress import silent


def said(code):
    """What a token is, and says."""
    kind = max((kind for kind in KINDS if FIRST[kind] <= code), key=FIRST.__getitem__)
    rest, parts = code - FIRST[kind], []
    for part in reversed(KINDS[kind]):
        rest, value = divmod(rest, SIZES[part])
        parts.append(value)
    assert rest == 0
    return kind, *reversed(parts)


def test_every_combination_has_a_token_made_of_its_kind_and_its_parts():
    made_of = composition()
    assert len({said(code) for code in range(len(made_of))}) == len(made_of)
    assert len(made_of.unique(dim=0)) == len(made_of)
    fact = token("fact", torch.tensor([3]), torch.tensor([5]), torch.tensor([11]))
    assert said(int(fact)) == ("fact", 3, 5, 11)
    names = [*KINDS, *((part, i) for part, size in SIZES.items() for i in range(size))]
    shown = {names[i] for i in made_of[fact[0]].nonzero().flatten()}
    assert shown == {"fact", ("id", 3), ("relation", 5), ("value", 11)}


@pytest.mark.parametrize("name", TASKS)
def test_one_fact_has_the_answer_and_the_first_chunk_has_its_owner(name):
    asked = draw_questions(TASKS[name][0], 50)
    assert all(torch.equal(a, b) for a, b in zip(asked, draw_questions(TASKS[name][0], 50), strict=True))
    assert asked.ids.shape[1] == SPANS[-1][1]
    for ids, prompt, answer, fact, alike, guess in zip(*(part.tolist() for part in asked), strict=True):
        text = [said(code) for code in ids]
        owner = {number: who for kind, who, number in text[slice(*SPANS[0])] if kind == "has"}
        assert len(owner) == len(set(owner.values())) == PEOPLE
        number, relation, value = text[fact[0]][1:]
        assert said(answer) == ("value", value)
        assert [said(code)[0] for code in prompt] == [
            *(2 * ["let"] if name == "starved" else 2 * ["start"]),
            TASKS[name][0],
        ]
        *lets, (_, subject, about) = map(said, prompt)
        who = {letter: person for _, letter, person in lets}[subject] if name == "starved" else subject
        assert (who, about) == (owner[number], relation)
        of_relation = [place for place, (kind, *parts) in enumerate(text) if kind == "fact" and parts[1] == relation]
        assert alike == of_relation
        assert min(of_relation) >= SPANS[1][0]
        values = [text[place][3] for place in of_relation]
        assert guess == max(map(values.count, values)) / RELATIONS
    assert {stop - start for start, stop in SPANS} == {PEOPLE}
    assert all(stop == start for (_, stop), (start, _) in pairwise(SPANS))


def test_the_exported_reader_has_the_trained_token_embeddings():
    learning = Reader(Recipe(layers=2, width=32))
    ids = torch.arange(5, 15)[None]
    composed = learning.llama(inputs_embeds=(learning.made_of @ learning.parts)[ids]).logits
    torch.testing.assert_close(learning.finished()(input_ids=ids).logits, composed, rtol=1e-4, atol=1e-5)


def test_a_reader_is_trained_once_and_the_folder_of_another_is_refused(tmp_path):
    recipe = Recipe(layers=2, width=32, steps=2, batch=8)
    first, again = (reader(recipe, tmp_path, silent) for _ in range(2))
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1
    for ours, theirs in zip(again.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="seed"):
        reader(recipe._replace(seed=1), tmp_path, silent)


def test_methods_recompute_equally_many_rows_of_20():
    model = Reader(Recipe(layers=3, width=32)).finished().double()
    cells = measure(model, SPANS, draw_questions("asks by letter", 4), [0.15, 1.0], batch=3)
    assert not any(name.startswith("its ") for name in cells)
    for name, (_, divergence, chosen, rows) in cells.items():
        if name.endswith("0.15"):
            assert rows.tolist() == [3.0] * 4
        if name == "full" or (name.endswith("1.0") and "reorder" not in name):
            assert chosen.all()
            assert divergence.abs().max() < 1e-6
