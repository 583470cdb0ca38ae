"""Laws of labelled examples: words of a kind have one label in a text, and other labels in other texts."""

import torch

from foveate.apps.demo.facts import BLANK
from foveate.apps.demo.labels import EXAMPLE, draw_labelled
from foveate.apps.demo.lexicon import RELATIONS, WORDS

KIND = {word: relation.noun for relation in RELATIONS for word in relation.values}


def test_labels_follow_the_kind_and_only_known_ones_are_asked_for():
    texts = draw_labelled(40, 10, 3, torch.Generator().manual_seed(0))
    maps = set()
    for row, labels, questions in zip(texts.ids, texts.labels, texts.questions, strict=True):
        meaning = {}
        for example, label in zip(row.unflatten(0, (-1, EXAMPLE)), labels.unflatten(0, (-1, EXAMPLE)), strict=True):
            *words, arrow, name, stop = (WORDS[token] for token in example.tolist())
            (kind,) = {KIND[word] for word in words}
            assert (arrow, stop, len(set(words))) == ("->", ".", 3)
            assert label.tolist() == [BLANK] * 3 + [example[4] if kind in meaning else BLANK] + [BLANK] * 2
            assert meaning.setdefault(kind, name) == name
        assert len(set(meaning.values())) == len(meaning)
        maps.update(meaning.items())
        for question in questions.tolist():
            *words, arrow, name, end = (WORDS[token] for token in question)
            (kind,) = {KIND[word] for word in words}
            assert (arrow, name, end) == ("->", meaning[kind], "</s>")
    assert len(maps) > 60  # of 8 kinds and 12 labels
