"""Laws of the reader's texts: what is asked can be known from what was read before, and from nothing less."""

import torch

from foveate.demo.facts import BLANK, ID, SENTENCE, ask, draw_facts
from foveate.demo.lexicon import IDS, LABELS, NAMES, RELATIONS, WORDS, reader_tokenizer

NOUNS = {relation.noun: number for number, relation in enumerate(RELATIONS)}
PHRASES = {" ".join(relation.phrase): number for number, relation in enumerate(RELATIONS)} | {"has id": ID}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sentences(ids):
    """Words of each sentence."""
    return [[WORDS[token] for token in sentence] for sentence in ids.unflatten(0, (-1, SENTENCE)).tolist()]


def known(ids):
    """Reads a text as a person would: {(name, relation): value}, and by which word each fact was told."""
    told, names, by = {}, {}, {}
    for first, second, third, fourth, last in sentences(ids):
        if (relation := PHRASES.get(f"{second} {third}")) is not None:
            subject, value = first, fourth
        elif fourth == "of":
            value, relation, subject = first, NOUNS[third], last
        else:
            continue
        name = names.get(subject, subject)
        assert name in NAMES, f"{subject} was never told"
        if relation == ID:
            names[value] = name
        assert (name, relation) not in told
        told[name, relation], by[name, relation] = value, subject
    return told, by


def test_a_text_tells_each_thing_once_and_an_id_before_it_is_used():
    for ids_first in (0.0, 1.0):
        facts = draw_facts(50, 30, generator(), ids_first=ids_first)
        for ids, owner, relation, value in zip(facts.ids, facts.owner, facts.relation, facts.value, strict=True):
            told, _ = known(ids)
            ours = {(o, r): v for o, r, v in zip(*(x.tolist() for x in (owner, relation, value)), strict=True)}
            assert told == {(WORDS[name], r): WORDS[v] for (name, r), v in ours.items() if name != BLANK}


def test_a_turned_fact_tells_the_same_with_its_subject_last_and_its_owner_is_told_there_alone():
    facts = draw_facts(50, 30, generator())
    chosen = torch.rand(facts.owner.shape, generator=generator()) < 0.5
    turned = facts.turn(chosen)
    assert torch.equal(turned.subject_last, chosen & (facts.owner != BLANK) & (facts.relation != ID))
    assert turned.owner.equal(facts.owner)
    for before, after in zip(facts.ids, turned.ids, strict=True):
        assert known(before) == known(after)
    names = facts.owner[turned.subject_last]
    spread = turned.owners.unflatten(1, (-1, SENTENCE))[turned.subject_last]
    at = turned.ids.unflatten(1, (-1, SENTENCE))[turned.subject_last] == facts.subject[turned.subject_last, None]
    assert torch.equal(spread[at], names)
    assert (spread[~at] == BLANK).all()
    rest = ~turned.subject_last.repeat_interleave(SENTENCE, 1)
    assert torch.equal(turned.ids[rest], facts.ids[rest])
    assert torch.equal(turned.owners[rest], facts.owners[rest])
    assert torch.equal(facts.turn(torch.zeros_like(chosen)).owners, facts.owners)


def test_the_answer_is_what_the_text_tells_of_the_person_behind_the_letters():
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


def test_texts_survive_the_tokenizer():
    tokenizer = reader_tokenizer()
    ids = draw_facts(20, 30, generator()).ids
    for text, row in zip(tokenizer.batch_decode(ids), ids.tolist(), strict=True):
        assert tokenizer(text, add_special_tokens=False).input_ids == row
    written = "Ada has id 17. 17 plays the flute.\nLet p be Ada. Question: p plays the what? Answer:"
    apart = "<s> Ada has id 17 . 17 plays the flute . Let p be Ada . Question : p plays the what ? Answer :"
    assert tokenizer(written).input_ids == [WORDS.index(word) for word in apart.split(" ")]
    assert len(set(WORDS)) == len(WORDS)
    values = [word for relation in RELATIONS for word in relation.values]
    assert len({*NAMES, *IDS, *LABELS, *values}) == len(NAMES) + len(IDS) + len(LABELS) + len(values)
