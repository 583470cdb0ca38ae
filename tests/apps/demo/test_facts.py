"""Laws of the reader's texts: every question can be answered from its text."""

import torch
from lab.training.questions import ask

from foveate.apps.demo.facts import BLANK, ID, SENTENCE, draw_facts
from foveate.apps.demo.lexicon import IDS, LABELS, PERSON_NAMES, RELATIONS, WORDS, reader_tokenizer

PHRASES = {" ".join(relation.phrase): number for number, relation in enumerate(RELATIONS)} | {"has id": ID}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sentences(ids):
    """Words of each sentence."""
    return [[WORDS[token] for token in sentence] for sentence in ids.unflatten(0, (-1, SENTENCE)).tolist()]


def known(ids):
    """Reads a text as a person would: {(name, relation): value}, and by which word each fact was told."""
    told, names, by = {}, {}, {}
    for subject, verb, link, value, _ in sentences(ids):
        if (relation := PHRASES.get(f"{verb} {link}")) is None:
            continue
        name = names.get(subject, subject)
        assert name in PERSON_NAMES, f"{subject} was never told"
        if relation == ID:
            names[value] = name
        assert (name, relation) not in told
        told[name, relation], by[name, relation] = value, subject
    return told, by


def test_each_fact_is_told_once_and_ids_are_defined_before_use():
    for ids_first in (0.0, 1.0):
        facts = draw_facts(50, 30, generator(), ids_first=ids_first)
        for ids, owner, relation, value in zip(facts.ids, facts.owner, facts.relation, facts.value, strict=True):
            told, _ = known(ids)
            ours = {(o, r): v for o, r, v in zip(*(x.tolist() for x in (owner, relation, value)), strict=True)}
            assert told == {(WORDS[name], r): WORDS[v] for (name, r), v in ours.items() if name != BLANK}


def test_answers_follow_from_the_text_and_the_chain_of_letters():
    facts = draw_facts(60, 24, generator())
    places = torch.multinomial((facts.owner != BLANK).float(), 3, generator=generator())
    asked = ask(facts, places, generator(), letters=(0, 3), nouns=0.5, numbers=0.3, begun=0.3)
    seen = set()
    for text, rows, lengths, people in zip(facts.ids, *asked, strict=True):
        told, _ = known(text)
        ids = {value: name for (name, relation), value in told.items() if relation == ID}
        for row, length, person in zip(rows, lengths.tolist(), people.tolist(), strict=True):
            words = [WORDS[token] for token in row[:length].tolist()]
            stands = ids.copy()
            while words[0] == "Let":
                stands[words[1]] = stands.get(words[3], words[3])
                words = words[5:]
            if len(words) == 3:
                who, relation = words[0], PHRASES[" ".join(words[1:])]
            elif words[2] == "what":
                who, relation = words[7], [*(relation.noun for relation in RELATIONS), "id"].index(words[5])
            else:
                who, relation = words[2], PHRASES[" ".join(words[3:5])]
            seen.add((len(words), who in IDS, len(stands) - len(ids)))
            answer, end, *rest = row[length:].tolist()
            assert WORDS[answer] == told[stands.get(who, who), relation]
            assert WORDS[person] == stands.get(who, who)
            assert WORDS[end] == "</s>"
            assert set(rest) <= {BLANK}
    assert len(seen) == 3 * (4 + 1)  # all forms, with up to three letters, or with an id


def test_the_same_seed_gives_the_same_texts():
    first, again, other = (draw_facts(4, 12, generator(seed)).ids for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_tokenizing_and_decoding_are_inverse():
    tokenizer = reader_tokenizer()
    ids = draw_facts(20, 30, generator()).ids
    for text, row in zip(tokenizer.batch_decode(ids), ids.tolist(), strict=True):
        assert tokenizer(text, add_special_tokens=False).input_ids == row
    written = "Ada has id 17. 17 plays the flute.\nLet p be Ada. Question: p plays the what? Answer:"
    apart = "<s> Ada has id 17 . 17 plays the flute . Let p be Ada . Question : p plays the what ? Answer :"
    assert tokenizer(written).input_ids == [WORDS.index(word) for word in apart.split(" ")]
    assert len(set(WORDS)) == len(WORDS)
    values = [word for relation in RELATIONS for word in relation.values]
    assert len({*PERSON_NAMES, *IDS, *LABELS, *values}) == len(PERSON_NAMES) + len(IDS) + len(LABELS) + len(values)
