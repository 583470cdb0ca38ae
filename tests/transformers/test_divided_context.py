"""A context divided over processes gives what one process gives."""

from functools import partial
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from tiny_lm import DOCUMENTS, PROMPTS, encoder, language_model, tokenizer

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute
from foveate.transformers import ChunkEncoder
from foveate.transformers import context as module

METHODS = (
    InfoFlowKV(recompute=0.4), InfoFlowKV(recompute=0.4, reorder=True), InfoFlowKV(norm="entropy", geometry="hl-tp"),
    EPIC(recompute=0.5), CacheBlend(recompute=0.3), FullPrefill(), NoRecompute(),
)  # fmt: skip
near = partial(torch.testing.assert_close, rtol=0, atol=1e-11)


def states(context):
    """Keys and values of all layers, of a context or a patched context."""
    layers: Any = context.cache().layers
    return [(layer.keys, layer.values) for layer in layers]


def check(family, rope, documents, methods):
    module.ANSWER_ROWS = 2  # answers need more room
    alone = encoder(family, rope)
    ours = ChunkEncoder(alone.model, tokenizer(), "<s> w60", process_group=dist.group.WORLD)
    one, context = (some.compose(some.encode(documents)) for some in (alone, ours))
    kept = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(kept, torch.tensor([len(context.rows)]))
    assert sum(kept) == len(one), "every row is kept once"
    layers = tuple(range(4))
    near(context.score(PROMPTS[1], layers), one.score(PROMPTS[1], layers))
    near(states(context), states(one))
    for method in methods:
        with context.patch(method, PROMPTS[1]) as got, one.patch(method, PROMPTS[1]) as want:
            assert got.order == want.order
            assert torch.equal(got.rows, want.rows)
            near(got.logits(), want.logits())
            near(states(got), states(want))
            assert got.generate(max_new_tokens=9) == want.generate(max_new_tokens=9)
            assert got.logits(last=1).shape == (1, 64)
    assert context.answers(METHODS[0], PROMPTS, max_new_tokens=4) == one.answers(METHODS[0], PROMPTS, max_new_tokens=4)


def check_all(families, methods=METHODS):
    for family, rope in families:
        check(family, rope, DOCUMENTS, methods)
    check("llama", "default", DOCUMENTS[:1] * 3, METHODS[:1])  # the same chunk more than once
    check("llama", "default", DOCUMENTS[2:3], METHODS[:1])  # a process has no chunk


def test_two_processes_give_what_one_gives(tmp_path):
    processes.run(2, tmp_path, check_all, [("qwen3", "yarn")])


@pytest.mark.slow
def test_three_and_four_processes_give_what_one_gives_in_each_family(tmp_path):
    families = {3: [("mixtral", "default"), ("smollm3", "default")], 4: [("llama", "llama3"), ("glm4", "partial")]}
    for ranks, some in families.items():
        (tmp_path / str(ranks)).mkdir()
        processes.run(ranks, tmp_path / str(ranks), check_all, some, METHODS[1:3])


def check_use():
    torch.manual_seed(dist.get_rank())
    group, model = dist.group.WORLD, language_model()
    ours = ChunkEncoder(model, tokenizer(), process_group=group)
    chunks = ours.encode(DOCUMENTS)
    texts = [None] * dist.get_world_size()
    with ours.compose(chunks).patch(InfoFlowKV(), PROMPTS[0]) as patched:
        dist.all_gather_object(texts, patched.generate(max_new_tokens=20, do_sample=True))
    assert len(set(texts)) == 1, "all processes sample the same tokens"
    with pytest.raises(ValueError, match="one context and one answer at a time, not 2"):
        ours.compose(chunks).answers(InfoFlowKV(), PROMPTS[:1], num_beams=2)
    assert [chunk.holder for chunk in chunks] == [0, 1, 1, 0], "each has early and late chunks"
    elsewhere = next(chunk for chunk in chunks if chunk.holder != dist.get_rank())
    for use in (elsewhere.to_bytes, lambda: ChunkEncoder(model, tokenizer()).compose([elsewhere])):
        with pytest.raises(ValueError, match=f"process {elsewhere.holder} keeps this chunk"):
            use()
    with pytest.raises(ValueError, match="sliding window"):
        ChunkEncoder(language_model("gemma3"), tokenizer(), process_group=group)
    other = language_model(seed=dist.get_rank())
    if dist.get_rank():
        with pytest.raises(ValueError, match="process 1 has another model or tokenizer than process 0"):
            ChunkEncoder(other, tokenizer(), process_group=group)
    else:
        ChunkEncoder(other, tokenizer(), process_group=group)


def test_chunks_of_another_process_and_models_that_cannot_be_divided_are_refused(tmp_path):
    processes.run(2, tmp_path, check_use)
