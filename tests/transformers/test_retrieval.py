"""Laws of retrieval: BM25 finds texts that share words, and passages come from any supported library."""

import os
import subprocess
import sys
from math import log
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_lm import DOCUMENTS, encoder

from foveate.methods.baselines.kv_baselines import NoRecompute
from foveate.transformers.documents import Passage
from foveate.transformers.embeddings import _sentence_transformer
from foveate.transformers.index import ChunkIndex, index_documents
from foveate.transformers.rag import ask
from foveate.transformers.retrieval import bm25, by_meaning, passage_of

TEXT = st.text(st.sampled_from("abcé, "), max_size=12)
NEW = "w40 w41 w42"


@given(st.lists(TEXT, min_size=1, max_size=6), TEXT)
def test_exactly_the_texts_that_share_a_word_are_found(texts, question):
    bags = [set(text.replace(",", " ").split()) for text in texts]
    words = set(question.replace(",", " ").split())
    assert set(bm25(tuple(texts))(question)) == {i for i, bag in enumerate(bags) if bag & words}


def test_texts_are_ranked_by_bm25():
    texts = "the cat sat on the mat", "The dog!", "a cat and a dog and a cat", "a bird"
    lengths, mean = [6, 2, 8, 2], 18 / 4
    times = {"the": [2, 1, 0, 0], "cat": [1, 0, 2, 0]}  # both in two texts of four
    scores = [
        sum(log(2) * f[i] / (f[i] + 1.5 * (1 - 0.75 + 0.75 * lengths[i] / mean)) for f in times.values())
        for i in range(4)
    ]
    assert bm25(texts)("the CAT") == sorted(range(3), key=lambda i: -scores[i])
    assert bm25(texts)("who?") == bm25(texts)("") == bm25(("!",))("x") == []


def test_a_text_with_all_words_is_found_whatever_their_frequency_length_and_spelling():
    texts = "It is who we are.", "C and D", "Cafe\u0301 Stra\u00dfe", "\u706f\u5854\u5efa\u4e8e1871\u5e74\u3002"
    for i, question in enumerate(["who is it?", "c d", "CAF\u00c9 STRASSE", "\u706f\u5854"]):
        assert bm25(texts)(question) == [i]


def test_by_meaning_ranks_by_cosine_of_sentence_transformers(monkeypatch):
    """Its models cannot be downloaded here: a fake model counts the letters of a text."""

    class SentenceTransformer:
        def __init__(self, name):
            assert name == "letters"

        def encode(self, texts, convert_to_tensor, show_progress_bar):
            return torch.tensor([[float(text.count(letter)) for letter in "abc"] for text in texts])

    monkeypatch.setitem(sys.modules, "sentence_transformers", ModuleType("sentence_transformers"))
    sys.modules["sentence_transformers"].SentenceTransformer = SentenceTransformer
    _sentence_transformer.cache_clear()
    assert by_meaning(("aab", "cccccc", "bbaa"), "letters")("a") == [0, 2, 1]
    _sentence_transformer.cache_clear()


@pytest.fixture
def index(tmp_path):
    index = index_documents(tmp_path, encoder("qwen3"), {f"{i}.txt": text for i, text in enumerate(DOCUMENTS)})
    index.build()
    return index


def read(index, passages, **options):
    """Numbers of the passages of an answer."""
    return ask(
        index, "w3", {"none": NoRecompute()}, prompt="{question}", passages=passages, max_new_tokens=2, **options
    ).passages


def test_numbers_and_texts_are_read_in_the_given_order_and_new_texts_join_the_index(index):
    assert read(index, [3, 0, 3]) == [3, 0, 3]
    assert read(index, [DOCUMENTS[2], NEW, 1]) == [2, 4, 1]
    assert index.passages[4] == Passage(NEW, f"{NEW}\n\n")
    assert (index.place / index._files[4]).exists()
    assert read(index, [NEW, 1, 2], top=2) == [4, 1]
    assert read(index, lambda question: [DOCUMENTS[0]] if question == "w3" else []) == [0]
    assert read(ChunkIndex(index.place / "new", index.encoder), [NEW]) == [0]


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        (DOCUMENTS[0], r"pass a list of passages, not one text: \['w1 w2"),
        ([], "there are no passages to read: pass at least one"),
        ([4], "there is no passage 4: the index has 4, numbered from 0"),
        ([-1], "there is no passage -1"),
        ([" \n"], r"a passage has no text: leave out ' \\n'"),
        ([3.5], "must be a number, a text, or a document of LangChain, LlamaIndex or Haystack, not 3.5"),
        ([SimpleNamespace(content=None)], "a passage has no text"),
        (3, "int is no retriever"),
        (lambda question: [], "the retriever found no passages for 'w3'"),
        (["w1 " * 128], "w1 w1 .* with its prefix: 130 tokens, but the model takes at most 128"),
    ],
)
def test_invalid_passages_are_named_in_the_error(index, passages, message):
    with pytest.raises(ValueError, match=message):
        read(index, passages)


def test_documents_and_retrievers_of_langchain(index):
    documents = pytest.importorskip("langchain_core.documents")
    retrievers = pytest.importorskip("langchain_core.retrievers")
    found = [documents.Document(NEW, metadata={"source": "new.pdf"}), documents.Document(DOCUMENTS[1])]

    class Retriever(retrievers.BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return found if query == "w3" else []

    assert read(index, found) == read(index, Retriever()) == [4, 1]
    assert index.passages[4].name == "new.pdf"


def test_nodes_and_retrievers_of_llama_index(index):
    schema = pytest.importorskip("llama_index.core.schema")
    retrievers = pytest.importorskip("llama_index.core.retrievers")
    nodes = [schema.TextNode(text=NEW, metadata={"file_name": "new.pdf"}), schema.Document(text=DOCUMENTS[1])]
    scored = [schema.NodeWithScore(node=node, score=0.5) for node in nodes]

    class Retriever(retrievers.BaseRetriever):
        def _retrieve(self, query_bundle):
            return scored if query_bundle.query_str == "w3" else []

    assert read(index, nodes) == read(index, scored) == read(index, Retriever()) == [4, 1]
    assert index.passages[4].name == "new.pdf"


def test_documents_and_retrievers_of_haystack(index):
    haystack = pytest.importorskip("haystack")
    from haystack.components.retrievers import InMemoryBM25Retriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    documents = [
        haystack.Document(content=f"w3 {NEW}", meta={"file_path": "new.pdf"}),
        haystack.Document(content="w9"),
    ]
    store = InMemoryDocumentStore()
    store.write_documents(documents)
    assert read(index, documents) == [4, 5]
    assert read(index, InMemoryBM25Retriever(store, top_k=1)) == [4]
    assert index.passages[4].name == "new.pdf"


def test_a_text_without_a_name_is_named_by_its_first_words():
    assert passage_of("One two three four five six seven eight nine ten.\n") == Passage(
        "One two three four five six seven ...", "One two three four five six seven eight nine ten.\n\n"
    )  # fmt: skip


def test_jax_is_not_run_although_it_is_installed(tmp_path):
    """bm25s would run it, and JAX takes most of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("")
    (tmp_path / "jax/lax.py").write_text("def top_k(*_): raise RuntimeError('JAX ran')")
    code = "import foveate.transformers.retrieval, bm25s, jax.lax; print(jax.lax.top_k)"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
