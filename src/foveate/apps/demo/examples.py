"""Example texts in the vocabulary of the built-in reader: facts, questions about them, and labelled examples."""

import csv
import io
from pathlib import Path

import torch

from foveate.apps.demo.facts import ID, SENTENCE, VALUE, draw_facts
from foveate.apps.demo.labels import EXAMPLE, draw_labelled
from foveate.apps.demo.lexicon import WORDS
from foveate.utils.files import write_whole

__all__ = ["write_examples"]

FILES, SENTENCES, PEOPLE, ASKED = 47, 6, 40, 200
EXAMPLES, LABELS = 96, 4


def write_examples(out: Path, seed: int = 0) -> tuple[dict[str, str], dict[str, str]]:
    """Write texts, questions and labelled examples. Returns questions and unlabelled inputs with the right answers.

    Args:
        out: Folder to write: facts/01.txt and so on, questions.txt with a question, a tab and the answer in each
            line, and examples.csv.
        seed: Random seed.
    """
    generator = torch.Generator().manual_seed(seed)
    facts = draw_facts(1, FILES * SENTENCES, generator, people=(PEOPLE, PEOPLE), by_id=(0.0, 0.0), ids_first=0.0)
    sentences = [_words(tokens) for tokens in facts.ids[0].split(SENTENCE)]
    for i in range(FILES):
        text = " ".join(f"{' '.join(words[:-1])}." for words in sentences[i * SENTENCES : (i + 1) * SENTENCES])
        write_whole(out / "facts" / f"{i + 1:02}.txt", f"{text}\n".encode())
    told = ((facts.relation[0] != ID) & (facts.owner[0] >= 0)).nonzero()[:, 0]
    asked = [sentences[i] for i in told[torch.randperm(len(told), generator=generator)[:ASKED]].tolist()]
    questions = {f"{' '.join(words[:VALUE])} what?": words[VALUE] for words in asked}
    lines = (f"{question}\t{answer}\n" for question, answer in questions.items())
    write_whole(out / "questions.txt", "".join(lines).encode())

    labelled = draw_labelled(1, EXAMPLES, 2, generator, kinds=(LABELS, LABELS))
    rows = [_words(tokens) for tokens in labelled.ids[0].split(EXAMPLE)]
    inputs = {" ".join(words[:3]): words[4] for words in map(_words, labelled.questions[0])}
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([("text", "label"), *((" ".join(r[:3]), r[4]) for r in rows)])
    write_whole(out / "examples.csv", file.getvalue().encode())
    return questions, inputs


def _words(tokens: torch.Tensor) -> list[str]:
    return [WORDS[token] for token in tokens.tolist()]
