"""Laws of reading documents: each type of file gives its text, and no file is left out without a word."""

import os
from collections import Counter

import docx
import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from foveate.transformers import readers
from foveate.transformers.readers import describe_ignored, read_documents

HTML = b"""<!doctype html><html><head><title>The keeper</title><meta charset="utf-8"><style>p {}</style></head><body>
<script>track()</script><h1>Lamps</h1><p>Ada <b>Brown</b> was <s>not</s> the <a href="http://x">k\xc3\xa9eper</a>.
<ul><li>one lamp<li>two lamps</ul><table><tr><th>year<th>keeper<tr><td>1890<td>Ada</table>&lt;|im_end|&gt;</body>"""


def pdf(path, text):
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(200, 200)
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    fonts = DictionaryObject({NameObject("/F1"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    content = DecodedStreamObject()
    content.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
    page[NameObject("/Contents")] = writer._add_object(content)
    writer.write(path)


def word(path):
    document = docx.Document()
    document.add_paragraph("Ada kept the lamp.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "1890", "Ada"
    document.add_paragraph("Bo followed.")
    document.save(str(path))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "notes"
    path.mkdir()
    return path


def test_each_type_of_file_gives_its_text(folder):
    (folder / "a.html").write_bytes(HTML)
    (folder / "a.py").write_text("def keeper():\n    return 'Ada'\n")
    (folder / "a.JSON").write_text('{"keeper": "Ada"}')
    (folder / "a.csv").write_text('\ufeffyear;keeper\n1890;"Brown; Ada"\n1900;\n', encoding="utf-8")
    (folder / "b.tsv").write_text("only\tnames\n")
    pdf(folder / "a.pdf", "Ada kept the lamp.")
    word(folder / "a.docx")
    found = read_documents(folder)
    assert found["a.py"] == "def keeper():\n    return 'Ada'\n"
    assert found["a.JSON"] == '{"keeper": "Ada"}'
    assert found["a.csv"] == "year: 1890\nkeeper: Brown; Ada\n\nyear: 1900"
    assert found["b.tsv"] == "only\tnames\n"
    assert found["a.pdf"].strip() == "Ada kept the lamp."
    assert found["a.docx"] == "Ada kept the lamp.\n\n1890 | Ada\n\nBo followed."
    page = found["a.html"]
    assert page.startswith("The keeper\n\n# Lamps\n\nAda **Brown** was ~~not~~ the k\u00e9eper.")
    assert "* one lamp\n* two lamps" in page
    assert "| 1890 | Ada |" in page
    assert "<|im_end|>" in page
    assert not [hidden for hidden in ("track", "p {}", "http") if hidden in page]


def test_what_is_not_read_is_counted_by_type(folder, monkeypatch):
    for name in ("a.txt", "b.PNG", "c.png", "d.zip", "LICENSE", "e.pdf", ".hidden.png"):
        (folder / name).write_text("text")
    monkeypatch.setitem(readers.PACKAGES, ".pdf", "no_such_package")
    skipped, ignored = [], Counter()
    assert list(read_documents(folder, skipped, ignored)) == ["a.txt"]
    assert not skipped
    assert describe_ignored(ignored) == (
        "ignored 5 files: 1 .pdf (pip install 'foveate[documents]'), 2 .png, 1 .zip, 1 without a suffix"
    )
    assert describe_ignored(Counter()) == ""
    (folder / "a.txt").unlink()
    with pytest.raises(
        ValueError, match=r"notes has no .txt, .* files: name a folder that has some; ignored 5 files: "
    ):
        read_documents(folder)


def test_links_that_leave_the_folder_and_what_cannot_be_read_are_named(folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "more").mkdir()
    (folder / "in").mkdir()
    (folder / "in" / "a.txt").write_text("one")
    (folder / "b.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "c").symlink_to(tmp_path / "more")
    (folder / "d.txt").symlink_to(folder / "in" / "a.txt")
    (folder / "e").symlink_to(folder / "in")
    (folder / "f.txt").symlink_to(folder / "gone.txt")
    os.mkfifo(folder / "g.txt")  # reading it would wait forever
    for name in ("h.pdf", "i.docx"):
        (folder / name).write_bytes(b"damaged")
    pdf(folder / "j.pdf", "")
    skipped = []
    assert read_documents(folder, skipped) == {"in/a.txt": "one", "d.txt": "one"}
    outside, damaged = "links to outside", "cannot be read"
    reasons = {"b.txt": outside, "c": outside, "f.txt": "a link to nothing", "g.txt": "is no file", "h.pdf": damaged,
               "i.docx": damaged, "j.pdf": "scanned pages have none"}  # fmt: skip
    for name, reason in reasons.items():
        (line,) = [line for line in skipped if line.startswith(f"{folder / name} ")]
        assert reason in line
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    assert read_documents(linked, []).keys() == {"in/a.txt", "d.txt"}
    assert read_documents(folder / "b.txt") == {(folder / "b.txt").as_posix(): "secret"}  # named by the user


def test_subfolders_that_git_ignores_as_a_whole_hold_no_documents(folder):
    for name in ("index/.gitignore", "index/a.json", "b/.gitignore", "b/c.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("*\n" if "index" in name else "c.json\n")
    assert read_documents(folder) == {"b/c.json": "c.json\n"}


def test_a_single_file_whose_package_is_missing_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(readers.READERS, ".pdf", lambda path: __import__("no_such_package"))
    (folder / "a.pdf").write_text("text")
    with pytest.raises(ModuleNotFoundError):
        read_documents(folder / "a.pdf")
