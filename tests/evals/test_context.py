"""Laws of the experiments on cached contexts: many at once are patched as one at a time."""

import pytest
import torch
from batched import Batch

from foveate import InfoFlowKV
from foveate.demo.lexicon import reader_tokenizer
from foveate.demo.training.reader import ReaderRecipe, untrained_reader
from foveate.integrations.transformers import ChunkEncoder
from foveate.methods.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows

SPANS = (1, 7), (7, 13), (13, 19)
METHODS = [
    FullPrefill(), NoRecompute(), RandomRows(recompute=0.3, seed=5), EPIC(recompute=0.3), CacheBlend(recompute=0.3),
    CacheBlend(recompute=0.3, rank="k"), InfoFlowKV(recompute=0.3), InfoFlowKV(recompute=0.3, norm="l1"),
    InfoFlowKV(recompute=0.3, geometry="hl-hp"), InfoFlowKV(recompute=0.3, geometry="tl-tp"),
    InfoFlowKV(recompute=0.3, geometry="hl-tp"), InfoFlowKV(recompute=0.3, boundary=1),
    InfoFlowKV(recompute=0.3, reorder=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = untrained_reader(ReaderRecipe(layers=4, width=64)).double().eval()
    for weight in model.parameters():
        weight.data.mul_(5)  # attention far from even
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_many_contexts_are_patched_as_one_at_a_time(model, method):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 400, (3, SPANS[-1][1]), generator=generator)
    ids[:, 0] = 0
    prompts = torch.randint(3, 400, (3, 4), generator=generator)
    together = Batch(model, ids, SPANS, prompts).patch([method] * 3)
    encoder = ChunkEncoder(model, reader_tokenizer())
    for i in range(3):
        context = encoder.compose(encoder.encode([ids[i, slice(*span)].tolist() for span in SPANS]))
        with context.patch(method, prompts[i].tolist()) as patched, torch.no_grad():
            assert patched.rows.tolist() == together.rows[i].tolist()
            assert patched.order == tuple(together.order[i].tolist())
            logits = model(input_ids=prompts[i][None], past_key_values=patched.context.cache()).logits[0, -1]
            torch.testing.assert_close(together.logits[i], logits.float(), rtol=1e-4, atol=1e-4)
