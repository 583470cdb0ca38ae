"""Laws of cached passages on a CUDA device: full recomputation is exact, loading keeps every bit, times are real."""

import pytest
import torch
from tiny_lm import DOCUMENTS, language_model, tokenizer

from foveate import InfoFlowKV
from foveate.apps.web.rag import reply_page
from foveate.methods.baselines.kv_baselines import EPIC, FullPrefill
from foveate.transformers import ChunkEncoder
from foveate.transformers.index import ChunkIndex, index_documents
from foveate.transformers.rag import STEPS, ask
from foveate.utils.timing import Stopwatch

pytestmark = pytest.mark.gpu


def test_full_recomputation_answers_as_full_prefill_and_every_step_is_timed(tmp_path):
    encoder = ChunkEncoder(language_model("qwen3", dtype=torch.float32).cuda(), tokenizer())
    index = index_documents(tmp_path, encoder, {f"{i}.txt": text for i, text in enumerate(DOCUMENTS)})
    index.build()
    for chunk, loaded in zip(encoder.encode(DOCUMENTS), index.load(range(4)), strict=True):
        assert loaded.keys.is_cuda
        assert torch.equal(chunk.keys, loaded.keys)
    methods = {"all": InfoFlowKV(recompute=1.0), "full": FullPrefill(), "reordered": InfoFlowKV(reorder=True),
               "epic": EPIC()}  # fmt: skip
    reply = ask(index, "w3 w5", methods, prompt="w21 {question} w23", passages=range(4), max_new_tokens=8)
    ours, full, reordered, epic = reply.answers
    assert ours.text == full.text
    assert abs(ours.divergence) < 1e-3
    for answer in (ours, reordered, epic):
        assert tuple(answer.seconds) == STEPS
        assert min(answer.seconds.values()) >= 0
    assert reply_page(index, [reply], {}).count("<mark class") == len(ours.rows)


def test_eight_bit_chunks_are_the_same_on_both_devices(tmp_path):
    model = language_model("qwen3", dtype=torch.bfloat16)
    encoder = ChunkEncoder(model.cuda(), tokenizer())
    index = index_documents(tmp_path, encoder, {"a": DOCUMENTS[2]}, eight_bit=True)
    index.build()
    (loaded,), on_cpu = index.load([0]), ChunkEncoder(model.cpu(), tokenizer())
    assert loaded.keys.is_cuda
    (same,) = ChunkIndex(tmp_path, on_cpu).load([0])  # the same fingerprint and checksums
    assert torch.equal(same.keys, loaded.keys.cpu())
    assert torch.equal(same.values, loaded.values.cpu())


def test_the_stopwatch_includes_work_that_is_still_queued():
    watch = Stopwatch(torch.device("cuda"))
    with watch.step("launch"):
        torch.cuda._sleep(1_000_000_000)  # cycles
    assert watch.seconds["launch"] > 0.1
