"""Laws of questions about documents: answers are the library's, and the page shows the rows that were computed."""

import re
from html.parser import HTMLParser

import pytest
import torch
from tiny_lm import DOCUMENTS, encoder, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foveate import InfoFlowKV
from foveate.apps.web.rag import reply_page, token_texts
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute
from foveate.transformers.documents import Passage
from foveate.transformers.index import ChunkIndex, index_documents
from foveate.transformers.rag import STEPS, Answer, Reply, ask, summarise

PROMPT = "w21 {question} w23"
SHORT = {"prompt": PROMPT, "max_new_tokens": 6}
ALL = {**SHORT, "passages": range(4)}


class Marks(HTMLParser):
    """Text and row of every token that the page marks, all of its text, and its tags."""

    def __init__(self, html):
        super().__init__()
        self.marked, self.text, self.tags, self._row = {}, "", set(), None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "mark" and "title" in dict(attrs):
            self._row = int(re.match(r"row (\d+),", dict(attrs)["title"])[1])
            self.marked[self._row] = ""

    def handle_endtag(self, tag):
        self._row = None

    def handle_data(self, data):
        self.text += data
        if self._row is not None:
            self.marked[self._row] += data.strip()


@pytest.fixture
def index(tmp_path):
    index = index_documents(tmp_path, encoder("qwen3"), {f"{i}.txt": text for i, text in enumerate(DOCUMENTS)})
    index.build()
    return index


def alone(index, question, tokens=6):
    """What the model generates from the same tokens without foveate."""
    ours = index.encoder
    ids = torch.cat([ours.prefix, *map(ours.tokens, DOCUMENTS), ours.tokens(PROMPT.replace("{question}", question))])
    output = ours.model.generate(
        input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=tokens, do_sample=False
    )
    return ours.tokenizer.decode(output[0, len(ids) :])


def test_everything_recomputed_and_full_prefill_answer_as_the_model_alone(index):
    for method in (InfoFlowKV(recompute=1.0), FullPrefill()):
        assert ask(index, "w3 w5", {"all": method}, **ALL).answers[0].text == alone(index, "w3 w5")


def test_answers_side_by_side_are_those_of_the_library(index):
    methods = {"ours": InfoFlowKV(recompute=0.4), "epic": EPIC(), "blend": CacheBlend(), "none": NoRecompute(),
               "full": FullPrefill()}  # fmt: skip
    advances = []
    reply = ask(index, "w3", methods, **ALL, advance=lambda: advances.append(1))
    assert len(advances) == 2 * len(methods)
    assert [answer.method for answer in reply.answers] == list(methods)
    context = index.encoder.compose(index.encoder.encode(DOCUMENTS))
    assert reply.spans == context.spans
    for answer in reply.answers:
        with context.patch(methods[answer.method], "w21 w3 w23") as patched:
            assert answer.rows.tolist() == patched.rows.tolist()
            assert answer.text == patched.generate(max_new_tokens=6)
            assert answer.divergence == pytest.approx(patched.fidelity(), abs=1e-6)
    torch.testing.assert_close(reply.scores, context.score("w21 w3 w23", InfoFlowKV().layers(4)))
    single = ask(index, "w3", {"ours": methods["ours"]}, **ALL).answers[0]
    assert (single.text, single.divergence) == (reply.answers[0].text, None)


def test_rows_of_moved_passages_are_counted_where_they_stand_on_the_page(index):
    method = InfoFlowKV(reorder=True, recompute=0.4)
    answer = ask(index, "w3 w5", {"ours": method}, **ALL).answers[0]
    context = index.encoder.compose(index.load(range(4)))
    with context.patch(method, "w21 w3 w5 w23") as patched:
        assert answer.order == patched.order != (0, 1, 2, 3)
        for chunk, moved in zip(patched.order, patched.context.spans, strict=True):
            inside = [row - moved[0] for row in patched.rows.tolist() if moved[0] <= row < moved[1]]
            start, stop = context.spans[chunk]
            assert [row - start for row in answer.rows.tolist() if start <= row < stop] == inside


def test_times_name_every_step_and_add_up(index):
    reply = ask(index, "w3", {"ours": InfoFlowKV(), "full": FullPrefill()}, **SHORT)
    ours, full = reply.answers
    assert tuple(ours.seconds) == STEPS
    assert tuple(full.seconds) == ("prompt", "decode")
    for answer in reply.answers:
        assert min(answer.seconds.values()) > 0
        assert answer.first_token == pytest.approx(sum(answer.seconds.values()) - answer.seconds["decode"])


def test_passages_are_taken_by_shared_words_as_many_as_fit_and_stay_in_order(index):
    reply = ask(index, "w19 w7", {"none": NoRecompute()}, **SHORT, top=2)  # document 3 has both words, 0 has one
    assert reply.passages == [0, 3]
    # prefix 2, question and prompt 3, documents 7, 5, 9, 6
    room = 128 - 2 - 3
    for answer, want in ((room - 13, [0, 3]), (room - 12, [3])):
        reply = ask(index, "w30 w7", {"none": NoRecompute()}, prompt="{question} w1", max_new_tokens=answer)
        assert reply.passages == want
    for answer, want in ((room - 27, [0, 1, 2, 3]), (room - 26, [0, 1, 2])):  # no passage has the word
        reply = ask(index, "w50", {"none": NoRecompute()}, prompt="{question} w1 w2", max_new_tokens=answer)
        assert reply.passages == want
    with pytest.raises(ValueError, match="the index has no passages: add at least one"):
        ask(ChunkIndex("memory://empty", index.encoder), "w3", {"none": NoRecompute()}, **SHORT)
    with pytest.raises(
        ValueError, match=r"3.txt with prompt and answer takes 129 tokens, but the model takes at most 128"
    ):
        ask(index, "w30 w7", {"none": NoRecompute()}, prompt="{question} w1", max_new_tokens=room - 5)
    with pytest.raises(
        ValueError, match=r"^question, prompt and answer take 202 tokens, .* at most 128 .*: ask a shorter"
    ):
        ask(index, "w30 " * 195, {"none": NoRecompute()}, prompt="{question} w1", max_new_tokens=4)


@pytest.mark.parametrize(
    "method", [InfoFlowKV(recompute=0.4), CacheBlend(recompute=0.3), NoRecompute(), FullPrefill()]
)
def test_the_page_marks_the_rows_of_the_patch_and_nothing_else(index, method):
    reply = ask(index, "w3 w5", {"ours": method, "other": EPIC(recompute=0.2)}, **ALL)
    marked = Marks(reply_page(index, [reply], {"model": "tiny"})).marked
    context = index.encoder.compose(index.load(range(4)))
    with context.patch(method, "w21 w3 w5 w23") as patched:
        rows = patched.rows.tolist()
    assert marked == {row: index.encoder.tokenizer.decode([context.ids[row]]) for row in rows}


def test_several_questions_begin_with_a_table_of_the_methods(index):
    methods = {"ours": InfoFlowKV(recompute=0.4), "full": FullPrefill()}
    first, second = (ask(index, question, methods, **ALL) for question in ("w3", "w5"))
    ours, full = first.answers
    replies = [first._replace(right=("nothing", f" {ours.text.upper()}!")), second]
    summary = summarise(replies)
    assert [row.method for row in summary] == ["ours", "full"]
    assert [row.accuracy for row in summary] == [1.0, float(full.text == ours.text)]
    for row, answers in zip(summary, zip(first.answers, second.answers, strict=True), strict=True):
        assert row.divergence == pytest.approx(sum(answer.divergence for answer in answers) / 2)
        assert row.first_token == pytest.approx(sum(answer.first_token for answer in answers) / 2)
        assert row.rows == pytest.approx(len(answers[0].rows) / len(first.scores))
    pages = (reply_page(index, shown, {}) for shown in (replies, [first, second]))
    page, unknown = (" ".join(re.sub(r"<[^>]*>", " ", html).split()) for html in pages)
    assert f"2 questions method right KL rows first token ours 100.0 % {summary[0].divergence:.2g} 38 %" in page
    assert page.index("2 questions method") < page.index("question 1 of 2")
    assert "method KL rows first token" in unknown


def test_an_answer_is_right_if_it_has_the_words_of_a_right_one():
    reply = Reply("", [], (), [], torch.empty(0), right=("New York", "42"))
    for text, right in (("It is new  york.", True), ("42", True), ("420", False), ("York New", False), ("", False)):
        assert reply.is_right(Answer("", text, {}, torch.empty(0), (), None)) is right


def test_passages_of_one_name_are_all_on_the_page(tmp_path):
    index = ChunkIndex(tmp_path, encoder())
    for text in ("w1 w2", "w3 w4"):
        index.number(Passage("prefix", text))
    reply = ask(index, "w5", {"all": FullPrefill()}, **SHORT)
    assert list(Marks(reply_page(index, [reply], {})).marked.values()) == ["<s>", "w60", "w1", "w2", "w3", "w4"]


def test_the_page_shows_what_it_was_given_and_escapes_it(tmp_path):
    attack = "<script>alert('&')</script>"
    index = index_documents(tmp_path, encoder(), {f"{attack}.txt": f"w1 {attack} w2", "b": "w3 w4"})
    index.build()
    replies = [ask(index, f"w3 {attack}", {attack: EPIC(), "full": FullPrefill()}, **SHORT) for _ in range(2)]
    html = reply_page(index, replies, {attack: attack})
    page = Marks(html)
    assert "script" not in page.tags
    assert "<script" not in html
    assert page.text.count(f"w3 {attack}") == 2  # headings
    assert page.text.count(f"w1 {attack} w2") == 2
    assert f"{attack}.txt" in page.text
    assert replies[0].answers[1].text in page.text
    assert not re.search(r"https?:|url\(|@import|<link|<iframe", html)


def test_each_token_has_its_text():
    assert token_texts(tokenizer(), "  w1 w2,w3\n\nw4 ") == ["  w1", " w2", ",", "w3", "\n\nw4"]
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rules = Tokenizer(models.BPE(alphabet, []))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes = PreTrainedTokenizerFast(tokenizer_object=rules)  # a token for each byte
    assert token_texts(by_bytes, "né\u20ac x") == ["n", "é", "", "€", "", "", " ", "x"]
