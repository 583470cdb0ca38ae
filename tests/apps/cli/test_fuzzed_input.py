"""A law of `foveate rag` and `foveate icl`: whatever they are given, they answer, or say in one line what is wrong."""

import random
import re
from functools import cache

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from foveate.apps.cli import app
from foveate.plots import figures
from foveate.transformers import model

PYTHON = re.compile(r"\b(None|Traceback|NoneType|errno|codec|tensor|dict|kwargs|self|\w+Error|block_size)\b|\w=|<=")
"""Words that no message for a user of the command line should have."""

HALF = "\ud83d"  # of a pair of surrogates; what an argument with wrong bytes becomes
GOOD = (
    "Ada",
    "Emil drinks only",
    "lives in what?",
    "?",
    "é",
    "灯塔",
    "😀",
    "Question: what?",
    "Ada keeps a what?",
    "cocoa",
)
WORDS = (
    *GOOD,
    *GOOD,
    "",
    " ",
    "\t",
    "[/]",
    HALF,
    "\x00",
    "\u202e",
    "a" * 900,
    "cocoa " * 300,
    "<script>",
    "\\",
    '"',
    "\r\n",
)
NUMBERS = "1", "2", "3", "0", "0.15", "-1", "nan", "inf", "1e9", "9" * 30, "half", ""
PARTS = "0.15", "1", "0", "0.5", "nan", "-1", "1.5", "half"
CONTENTS = (
    b"Ada drinks only tea.",
    b"\xef\xbb\xbfAda lives in Cork.",
    b"Ada " * 200,
    "灯塔建于1871年。".encode(),
    b"?!\n\n...",
    b"a" * 900,
    b"Ada\r\n\r\nBo keeps a goat.\r\n",
    b"Emil lives in Rome. Emil drinks only cocoa.",
    b"\x00\x01",
    b" \n",
    b"\xff",
)
ROWS = b"".join(b"Ada keeps %d,x%d\n" % (i, i % 3) for i in range(40))
POOLS = (
    *[b"text,label\n" + ROWS] * 18,
    *[b'{"text": "Ada", "label": 1}\n{"text": "Bo", "label": 2}\n'] * 9,
    b"text,label\n" + b"Ada,x\n" * 30,
    b"text,label\nAda Bo,x\nCy,y\nBo,x\n",
    b'text,label\n"Ada,x\nBo,y\n',
    b'text,label\nAda,x\nBo,"y"z\n',
    b"text,label\n,x\n",
    b"text,label\nAda,\nBo,y\n",
    b"",
    b"\n\n",
    b"text\nAda\nBo\n",
    b"text,text\nAda,Bo\n",
    b"text;label\nAda;x\n",
    b"\xff\xfe",
    b"text,label\nAda,x,y\n",
    b'{"text": "Ada"',
    b"[1]\n",
    b'{"text": "\\ud83d", "label": "x"}\n',
    b"[" * 100_000,
    b'{"text": ' + b"9" * 5000 + b"}",
    b'{"text": null, "label": "x"}\n',
    b'{"text": ["Ada"], "label": {"a": NaN}}\n',
    b"text,label\nA\x00,x\n",
    b"text,label\n" + b"a" * 200_000 + b",x\n",
)
ARRAYS = b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x80\x04N.", b"{}", b"\xff" * 40
RAG = {
    "--method": ("infoflow_kv", "epic", "cacheblend", "random", "none", "full", "", "inflow"),
    "--recompute": PARTS,
    "-o": (
        "norm=l1",
        "reorder=true",
        "boundary=2",
        "scoring_layers=0%-50%",
        "norm",
        "boundary=-1",
        "=",
        "recompute=2",
        "scoring_layers=(9,)",
        "geometry=x",
        "exclude_first=3",
        "recompute=__import__('os')",
        "boundary=" + "(" * 300,
    ),
    "--chunk": ("12", "20", "64", *NUMBERS),
    "--top": NUMBERS,
    "--prompt": ("{question}", "Question: {question} Answer:", "Question: {question} Answer:", *WORDS),
    "--prefix": WORDS,
    "--out": ("a.html", "new/page.html", "notes", "a.txt", "x" * 300 + ".html"),
    "--index": ("new", "also/new", "notes/0.txt"),
    "--max-new-tokens": ("1", "3", *NUMBERS),
    "--compare": (),
    "--chat": (),
    "--dtype": ("float32", "float32", "int8"),
}
ICL = {
    "--text": ("text", "text", "label", *WORDS),
    "--label": ("label", "label", "text", "none", ""),
    "--blocks": ("4", *NUMBERS),
    "--block-size": ("4", *NUMBERS),
    "--strategy": ("global_diverse", "local_diverse", "local_coherent", "x"),
    "--order": ("picked", "central_last", ""),
    "--balance": ("proportional", "equal", "other"),
    "--max-similarity": ("0.9", *PARTS),
    "--embeddings": ("pool.npy", "nothing.npy", "pool.csv"),
    "--out": ("b.jsonl", "new/b.jsonl", "pool.csv", "a.txt"),
    "--template": ("{text} {label}", "{text}: {label} ", "{label}{text}", *WORDS),
    "--combine": ("concatenate", "parallel_windows", "all"),
    "--mix": ("poe", "max", ""),
    "--max-new-tokens": NUMBERS,
}


def rag(draw, folder):
    """Arguments and standard input of `foveate rag`."""
    (folder / "notes").mkdir()
    for i in range(draw.choice([0, 1, 1, 2, 2, 3, 3])):
        (folder / "notes" / f"{i}.txt").write_bytes(draw.choice(CONTENTS))
    asked = [text(draw) for _ in range(draw.choice([0, 1, 1, 2]))]
    lines = "\n".join(text(draw) for _ in range(draw.choice([0, 1, 3]))).encode("utf-8", "surrogatepass")
    where = draw.choice([*["notes"] * 15, "nowhere", "notes/0.txt", "", HALF])
    return ["rag", where, *asked, "--max-new-tokens", "2", *options(draw, RAG)], lines


def icl(draw, folder):
    """Arguments of `foveate icl`, which reads no standard input."""
    pool = "pool.csv" if (content := draw.choice(POOLS))[:1] not in (b"{", b"[") else "pool.jsonl"
    (folder / pool).write_bytes(content)
    (folder / "pool.npy").write_bytes(draw.choice(ARRAYS))
    asked = ["--ask", text(draw)] if draw.random() < 0.7 else []
    usual = ["--blocks", "2", "--block-size", "1", "--label", "label", *asked]
    return ["icl", draw.choice([pool] * 19 + ["none.csv"]), *usual, *options(draw, ICL)], b""


def text(draw):
    return " ".join(draw.choices(WORDS, k=draw.choice([1, 1, 2])))


def options(draw, some):
    """Up to three options; the first values of each are the more frequent."""
    names = draw.sample(sorted(some), draw.choice([0, 1, 1, 2, 3]))
    picks = [some[name][: draw.choice([1, 2, None])] for name in names]
    return [
        part for name, values in zip(names, picks, strict=True) for part in (name, *draw.sample(values, bool(values)))
    ]


@pytest.fixture(scope="module")
def one_reader():
    """All commands share a reader, which none changes, and draw no plot: both take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_model", cache(model.load_model))
        patch.setattr(figures, "draw_coverage", lambda reports: Figure())
        yield


def check(command, seed, folder):
    """Run a command, and return what it says is wrong; nothing if it answers."""
    arguments, lines = command(random.Random(seed), folder)
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"], input=lines)
    about = f"seed {seed}: {arguments} {lines}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
    assert isinstance(result.exception, SystemExit | None), about
    assert result.exit_code in (0, 2), about
    if not result.exit_code:
        return ""
    said = [line for line in result.stderr.splitlines() if line.startswith("error:") or "─ Error" in line]
    assert len(said) == 1, about
    assert not PYTHON.search(re.sub(r"'.*'", "", said[0])), about  # what was given is quoted
    assert "Error" in said[0] or len(said[0]) > len("error: ") + 10, about
    return said[0]


@pytest.mark.usefixtures("as_a_user", "one_reader")
@pytest.mark.parametrize("command", [rag, icl])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 90), marks=pytest.mark.slow)])
def test_whatever_is_given_is_answered_or_refused_in_one_line(command, seeds, tmp_path, monkeypatch):
    wrong = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        wrong += bool(check(command, seed, folder))
    assert 0.2 < wrong / len(seeds) < 0.8
