"""Laws of `foveate rag`, tried as a user would."""

import errno
import os
import re
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from tiny_lm import DOCUMENTS, language_model, tokenizer
from typer.testing import CliRunner

from foveate import InfoFlowKV
from foveate.apps.cli import app
from foveate.apps.cli import rag as rag_command
from foveate.apps.cli.rag_index import bytes_of
from foveate.transformers import ChunkEncoder, folder, rag, stored_documents
from foveate.transformers.model import FAMILIES
from foveate.transformers.stored_documents import first_document


@pytest.fixture(autouse=True)
def in_a_folder_with_notes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "notes" / f"{i}.txt").write_text(text)


def run(model, *arguments, input=None):
    always = ["rag", "notes", "--model", model, "--device", "cpu", "--max-new-tokens", 5]
    return CliRunner().invoke(app, [str(argument) for argument in (*always, *arguments)], input=input)


def said(result):
    return " ".join(result.output.split())


def test_the_answer_is_that_of_the_library_and_the_next_run_encodes_nothing(model, tmp_path):
    result = run(model, "w3 w8 w5", "--recompute", 0.4, "--prompt", "w21 {question} w23", "-o", "norm=l1")
    assert result.exit_code == 0, result.output
    assert "4 passages, 27 tokens: 4 encoded, 0 found, 0 removed" in said(result)
    ours = ChunkEncoder(language_model("qwen3", dtype=torch.float32), tokenizer())
    context = ours.compose(ours.encode(DOCUMENTS))
    with context.patch(InfoFlowKV(recompute=0.4, norm="l1"), "w21 w3 w8 w5 w23") as patched:
        assert f"w3 w8 w5 {patched.generate(max_new_tokens=5)}" in said(result)
        page = (tmp_path / "rag.html").read_text()
        assert page.count('title="row ') >= len(patched.rows)
        assert page.count("<mark class") == len(patched.rows) == 11
    assert "0 encoded, 4 found, 0 removed" in said(run(model, "w3"))


def test_changed_documents_are_encoded_again_and_removed_ones_deleted(model, tmp_path):
    run(model)
    (tmp_path / "notes" / "0.txt").write_text("w1 w2")
    (tmp_path / "notes" / "1.txt").unlink()
    assert "3 passages, 17 tokens: 1 encoded, 2 found, 2 removed" in said(run(model))
    assert len(list((tmp_path / "notes" / ".foveate").glob("tiny-*/*.safetensors"))) == 3
    assert "3 encoded, 0 found" in said(run(model, "--index", "elsewhere"))
    assert len(list((tmp_path / "elsewhere").glob("*.safetensors"))) == 3


def test_questions_from_arguments_or_a_pipe_share_a_page(model, tmp_path):
    result = run(model, "w3", "w5", "--out", "two.html")
    piped = run(model, "--out", "piped.html", input="w3\n\n w5 \n")
    assert result.exit_code == piped.exit_code == 0
    for page in ("two.html", "piped.html"):
        text = (tmp_path / page).read_text()
        assert "<h1>w3</h1>" in text
        assert "<h1>w5</h1>" in text
    known = run(model, "w3\tno\tneither", "w5", "--compare")
    assert "right answer: no or neither" in said(known)
    assert "2 questions right KL rows first token" in said(known)
    assert "question 1 is empty" in said(run(model, "\tw3"))
    nothing = run(model, "--out", "none.html", input="")
    assert nothing.exit_code == 0
    assert not (tmp_path / "none.html").exists()


def test_ignored_files_are_counted_by_type(model, tmp_path):
    for name in ("a.png", "b.png", "c.zip"):
        (tmp_path / "notes" / name).write_text("x")
    counts = "ignored 3 files: 2 .png, 1 .zip"
    assert counts in said(run(model, "w3"))
    added = CliRunner().invoke(app, ["rag", "add", "index", "notes", "--model", str(model), "--device", "cpu"])
    assert counts in said(added)
    assert "4 passages" in said(added)


def test_what_was_answered_before_ctrl_c_is_kept(model, tmp_path, monkeypatch):
    ask = rag.ask

    def interrupted(index, question, *arguments, **options):
        if question == "w5":
            raise KeyboardInterrupt
        return ask(index, question, *arguments, **options)

    monkeypatch.setattr(rag, "ask", interrupted)
    result = run(model, "w3", "w5", "w7")
    assert result.exit_code == 130
    assert result.stdout.startswith("w3\n")
    page = (tmp_path / "rag.html").read_text()
    assert "<h1>w3</h1>" in page
    assert "question 1 of 1" in page


def test_the_help_names_every_family_of_models():
    text = CliRunner().invoke(app, ["rag", "ask", "--help"]).output.casefold()
    for family in FAMILIES:
        assert re.match("[A-Z][a-z]+", family.__name__)[0].casefold() in text


def test_a_terminal_is_prompted_until_an_empty_line(monkeypatch):
    typed = iter(["w3 ", "w5", "", "w7"])
    monkeypatch.setattr(rag_command.console, "input", lambda _: next(typed))
    monkeypatch.setattr(rag_command.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert list(rag_command._lines(None)) == [["w3"], ["w5"]]


def test_compare_answers_with_every_method(model, tmp_path):
    result = run(model, "w3 w5", "--compare", "--method", "epic", "--chunk", 4)
    assert result.exit_code == 0, result.output
    for name in ("epic", "infoflow_kv", "cacheblend", "random", "none", "full"):
        assert name in said(result)
        assert f"<td>{name}</td>" in (tmp_path / "rag.html").read_text()
    assert "0.txt, part 2" in said(result)
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80  # the last line is a path
    assert "\u2026" not in result.stdout


def test_a_chat_template_frames_documents_and_question(model, tmp_path):
    words = tokenizer()
    words.chat_template = "<s> w40 {% for m in messages %}{{ m['content'] }}{% endfor %} w41"
    chat = tmp_path / "chat"
    language_model("qwen3", dtype=torch.float32).save_pretrained(chat)
    words.save_pretrained(chat)
    framed = run(chat, "w3", "--prompt", "{question}", "--prefix", "w42")
    by_hand = run(model, "w3", "--prompt", "{question} w41", "--prefix", " w40 w42")
    plain = run(chat, "w3", "--prompt", "{question} w41", "--prefix", " w40 w42", "--no-chat")
    assert framed.exit_code == 0, framed.output
    answers = [result.stdout.splitlines()[1] for result in (framed, by_hand, plain)]
    assert answers[0] == answers[1] == answers[2]
    assert run(model, "w3", "--chat").exit_code == 2
    words.chat_template = "{{ raise_exception('only tools may speak') }}"
    words.save_pretrained(chat)
    refused = run(chat, "w3")
    assert refused.exit_code == 2
    assert "the chat template refuses a user's message (only tools may speak): turn chat off" in said(refused)


def test_text_that_is_not_utf8_is_refused_in_one_line(model, tmp_path):
    for result in (run(model, "w3 \udcff"), run(model, "w3", "--prefix", "\udcff"), run(model, input=b"w3 \xff\n")):
        assert result.exit_code == 2
        assert re.search(r"error: (the )?\w+ (is|are) not UTF-8 text: ", said(result))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--method", "info"],
            "unknown method 'info': choose one of infoflow_kv, epic, cacheblend, random, none, full",
        ),
        (["--recompute", 15], "recompute is the fraction of rows to recompute, 0 to 1, not 15.0"),
        (["--method", "none", "--recompute", 0.5], "NoRecompute has no option 'recompute': choose from none"),
        (["-o", "norm=l3"], "norm must be one of l2, l1, entropy, not 'l3'"),
        (["-o", "depth=3"], "InfoFlowKV has no option 'depth'"),
        (["--prompt", "what?"], "--prompt must contain {question}"),
        (["--out", "page.txt"], "--out must name an HTML page, not page.txt"),
        (
            ["--chunk", 0, "--prefix", "w1 " * 120],
            "2.txt with its prefix: 130 tokens, but the model takes at most 128",
        ),
        (["--top", -1], "--top"),
        (["--max-disk", "much"], "cannot read the size 'much': write a number and a unit, such as 500MB or 20GB"),
        (["--index", "nowhere://x"], "Protocol not known: nowhere"),
        (["--device", "quantum"], "unknown device 'quantum'"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(model, tmp_path, arguments, message):
    result = run(model, "w3", *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.glob("*.html"))


def test_bad_documents_are_listed_together_and_skipped(model, tmp_path):
    for name, content in {"empty": b"  ", "image": b"\xff\xfe", "long": b"w1 " * 128}.items():
        (tmp_path / "notes" / f"{name}.txt").write_bytes(content)
    told = said(run(model, "w3", "--chunk", 0))
    assert "skipped 3 documents:" in told
    for message in ("empty.txt is empty", "image.txt is not UTF-8", "long.txt with its prefix: 129 tokens"):
        assert message in told
    assert "4 passages, 27 tokens: 4 encoded" in told


def test_an_index_is_made_changed_and_asked_without_its_folder(model, tmp_path):
    def rag(*arguments):
        result = CliRunner().invoke(app, ["rag", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return said(result)

    ours = "--model", model, "--device", "cpu"
    assert "4 encoded, 0 found" in rag("index", "notes", "--index", "index", *ours)
    (tmp_path / "0.txt").write_text("w40 w41 w42")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "0.txt").write_text("w43 w44")
    assert "5 passages, 25 tokens: 2 encoded, 3 found, 1 removed" in rag("add", "index", "0.txt", "more", *ours)
    assert "5 documents" in (told := rag("info", "index"))
    assert "more/0.txt" in told
    rag("remove", "index", "0.txt", "1.txt")
    answer = rag("./index", "w43 w19", "--max-new-tokens", 5, *ours)
    assert "more/0.txt 2" in answer
    assert "3.txt 6" in answer
    assert "left out 1 passages" in answer
    missing = CliRunner().invoke(app, ["rag", "remove", "index", "none.txt"])
    assert missing.exit_code == 2
    assert "has no document none.txt: it has" in said(missing)


def test_another_model_is_refused_unless_forced(model, tmp_path):
    assert run(model, "w3", "--index", "index").exit_code == 0
    before = {path.name for path in (tmp_path / "index").iterdir()}
    refused = run(model, "w3", "--index", "index", "--prefix", "w42")
    assert refused.exit_code == 2
    assert f"error: index was made with another prefix ({model}, float32, " in said(refused)
    assert {path.name for path in (tmp_path / "index").iterdir()} >= before
    for command in (["index", "notes", "--index", "index"], ["add", "index", "notes/0.txt"], ["ask", "index", "w3"]):
        ours = ["rag", *command, "--model", str(model), "--device", "cpu", "--dtype", "bfloat16"]
        assert "made with another weights, dtype" in said(CliRunner().invoke(app, ours))
    assert "4 encoded, 0 found, 4 removed" in said(run(model, "w3", "--index", "index", "--prefix", "w42", "--force"))
    told = CliRunner().invoke(app, ["rag", "info", "index"])
    assert f"encoded by {model}, float32, 20" in told.output


def test_an_index_whose_chat_template_tells_the_date_lasts(model, tmp_path, monkeypatch):
    words, chat = tokenizer(), tmp_path / "chat"
    words.chat_template = "<s> {{ strftime_now('w%d') }} {% for m in messages %}{{ m['content'] }}{% endfor %} w41"
    language_model("qwen3", dtype=torch.float32).save_pretrained(chat)
    words.save_pretrained(chat)
    answers = []
    for day in (28, 29):
        monkeypatch.setattr(
            stored_documents, "datetime", SimpleNamespace(now=lambda zone, day=day: datetime(2025, 1, day))
        )
        result = run(chat, "w3")
        assert ("4 encoded, 0 found" if day == 28 else "0 encoded, 4 found") in said(result)
        answers.append(result.stdout.splitlines()[1])
        (tmp_path / "new.txt").write_text("w40")
        place = str(next((tmp_path / "notes" / ".foveate").iterdir()))
        added = CliRunner().invoke(app, ["rag", "add", place, "new.txt", "--model", str(chat), "--device", "cpu"])
        assert "1 encoded, 4 found" in said(added)
    assert answers[0] == answers[1]
    assert "2025-01-28" in CliRunner().invoke(app, ["rag", "info", place]).output
    assert first_document(place).made["date"] == "2025-01-28"


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_gives_the_answer(model, tmp_path, monkeypatch, caplog, kind):
    answer = run(model, "w3 w5").stdout.splitlines()[1]
    next((tmp_path / "notes").rglob("*.safetensors")).unlink()

    def fails(path, content):
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr(folder, "write_whole", fails)
    monkeypatch.setattr(rag_command, "write_whole", fails)
    result = run(model, "w3 w5")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == answer
    assert "0 encoded, 3 found, 0 removed, 1 not written" in said(result)
    assert f"cannot write the page rag.html: {os.strerror(kind)}" in said(result)
    assert [record for record in caplog.messages if "cannot be written" in record] == caplog.messages[:1]
    indexing = CliRunner().invoke(app, ["rag", "index", "notes", "--model", str(model), "--device", "cpu"])
    assert indexing.exit_code == 2
    assert "error: the index is incomplete" in said(indexing)


def test_info_and_remove_import_no_transformers_library(model, tmp_path):
    assert run(model, "--index", "index", input="").exit_code == 0
    script = """
import sys
from typer.testing import CliRunner
from foveate.apps.cli import app
for command in (["info", "index"], ["remove", "index", "0.txt"]):
    assert CliRunner().invoke(app, ["rag", *command]).exit_code == 0
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_processes_that_are_launched_together_divide_a_folder(model):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "foveate"]
    index = ["rag", "index", "notes", "--model", str(model), "--device", "cpu"]
    done = subprocess.run([*launch, *index], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("4 passages, 27 tokens") == 1
    alone = said(run(model, "w3 w8 w5"))
    assert "0 encoded, 4 found" in alone
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "foveate"]
    ask = ["rag", "notes", *index[3:], "--max-new-tokens", "5"]
    done = subprocess.run([*launch, *ask], input="w3 w8 w5\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    question, answer, *_ = done.stdout.splitlines()
    assert f"{question} {answer} " in alone


@pytest.mark.parametrize(("text", "size"), [("20GB", 2e10), ("1.5 MiB", 1.5 * 2**20), ("7", 7), ("3k", 3000), ("", 5)])
def test_sizes_have_units(text, size):
    assert bytes_of(text, 5) == size


def test_missing_folders_and_models_are_named(model, tmp_path, monkeypatch):
    def fails(*arguments):
        result = CliRunner().invoke(app, ["rag", *map(str, arguments)])
        assert result.exit_code == 2, result.output
        return said(result)

    assert "nowhere is not a folder" in fails("nowhere", "w3", "--model", model)
    assert "notes/0.txt is a file: name its folder" in fails("notes/0.txt", "w3", "--model", model)
    assert "notes is no index: the index of a folder is in notes/.foveate/" in fails("info", "notes")
    assert "notes holds documents: put the files there" in fails("add", "notes", "notes/0.txt", "--model", model)
    (tmp_path / "empty").mkdir()
    assert "empty has no .txt, .md, .html, .pdf or other text files" in fails("empty", "w3", "--model", model)
    assert "cannot load nobody/nothing" in fails("notes", "w3", "--model", "nobody/nothing")
    monkeypatch.setitem(sys.modules, "foveate_models", None)
    assert "not installed: pip install 'foveate[models]' (in a clone: pip install -e models)" in fails("notes", "w3")
