"""Laws of batches: contexts and prompts of any lengths give the same results together as alone."""

from itertools import product
from threading import Thread

import pytest
import torch
from tiny_lm import DOCUMENTS, PAIRS, PROMPTS, encoder, full_logits

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.transformers import answers, row_cache
from foveate.transformers.context import patch_batch

METHODS = [*(InfoFlowKV(recompute=0.4, geometry=geometry) for geometry in ("global", "hl-hp", "tl-tp", "hl-tp")),
           InfoFlowKV(recompute=0.4, boundary=2), InfoFlowKV(reorder=True, recompute=0.4), InfoFlowKV(norm="l1"),
           RandomRows(), EPIC(), CacheBlend(), CacheBlend(rank="k"), FullPrefill(), NoRecompute()]  # fmt: skip
ORDERS = [(0, 1, 2, 3), (2, 0), (1, 3)]


def contexts_of(ours):
    """Contexts of 29, 18 and 13 tokens."""
    chunks = ours.encode(DOCUMENTS)
    return [ours.compose([chunks[i] for i in order]) for order in ORDERS]


def near(first, second, tolerance=1e-12):
    torch.testing.assert_close(first, second, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_padded_batch_is_patched_as_each_context_alone(method):
    ours = encoder("qwen3", "yarn")
    contexts, prompts = contexts_of(ours), [ours.tokens(PROMPTS[i]) for i in (0, 1, 2)]
    together = patch_batch(contexts, prompts, [method] * 3)
    keys, logits = together.cache.keys, together.logits()
    for i, context in enumerate(contexts):
        with context.patch(method, PROMPTS[i]) as patched:
            assert together.rows[i].tolist() == patched.rows.tolist()
            assert together.orders[i] == patched.order
            near(logits[i], patched.logits())
            near(keys[:, i, :, : len(context)], torch.cat([layer.keys for layer in patched.cache().layers]))
            near(together.logits(last=1)[i], patched.logits(last=1))


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 27, "eos_token_id": [*range(3, 60)], "pad_token_id": 1},
        {"no_repeat_ngram_size": 2, "min_length": 26, "num_beams": 3, "num_return_sequences": 2, "eos_token_id": 9},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_that_count_tokens_or_compare_them_ignore_padding(options):
    ours = encoder("qwen3", "yarn")
    contexts, method = contexts_of(ours), InfoFlowKV(recompute=0.4)
    together = answers(contexts, method, PROMPTS, max_new_tokens=12, **options)
    alone = [
        context.answers(method, [prompt], max_new_tokens=12, **options)
        for context, prompt in zip(contexts, PROMPTS, strict=True)
    ]
    assert together == [text for texts in alone for text in texts]
    assert len(set(together)) > 1


@pytest.mark.parametrize("pass_rows", [pytest.param(8192, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(("family", "rope"), PAIRS)
def test_recomputing_all_rows_of_a_padded_batch_is_the_full_prefill_of_each(family, rope, pass_rows, monkeypatch):
    ours = encoder(family, rope)
    contexts, prompts = contexts_of(ours), [ours.tokens(PROMPTS[i]) for i in (1, 0, 2)]
    monkeypatch.setattr(row_cache, "RECOMPUTE_ROWS", pass_rows)
    together = patch_batch(contexts, prompts, [InfoFlowKV(recompute=1.0)] * 3)
    for context, prompt, logits in zip(contexts, prompts, together.logits(), strict=True):
        # Cohere rotates in float32 whatever the dtype
        near(logits, full_logits(ours, context, prompt.tolist()), 1e-6 if family.startswith("cohere") else 1e-12)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 6}),
        ("phi3", {"sliding_window": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("gemma3", {"final_logit_softcapping": 2.0, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("gpt_oss", {"attention_bias": False, "sliding_window": 40}),
    ],
)
def test_sliding_windows_are_exact_in_a_padded_batch(family, config):
    ours = encoder(family, **config)
    contexts, prompts = contexts_of(ours), [ours.tokens(PROMPTS[i]) for i in (1, 0, 2)]
    together = patch_batch(contexts, prompts, [FullPrefill()] * 3)
    stale = patch_batch(contexts, prompts, [NoRecompute()] * 3)
    for i, (context, prompt, logits) in enumerate(zip(contexts, prompts, together.logits(), strict=True)):
        full = full_logits(ours, context, prompt.tolist())
        near(logits, full)
        assert config.get("sliding_window") == 1 or (stale.logits()[i] - full).abs().max() > 0.001


def alone(contexts, method, prompts, **options):
    """Answers to one prompt at a time."""
    texts = []
    for context, prompt in zip(contexts, prompts, strict=True):
        with context.patch(method, prompt) as patched:
            texts.append(patched.generate(**options))
    return texts


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral", "gemma3", "gpt_oss"))]
)
def test_answers_of_a_batch_equal_answers_to_single_questions(family):
    ours = encoder(family)
    pairs = list(product(contexts_of(ours), PROMPTS))
    contexts, prompts = zip(*pairs, strict=True)
    for method, batch_size in ((InfoFlowKV(), 9), (InfoFlowKV(reorder=True, recompute=0.4), 4)):
        together = answers(contexts, method, prompts, max_new_tokens=4, batch_size=batch_size)
        assert together == alone(contexts, method, prompts, max_new_tokens=4)
        assert len(set(together)) > 3
    assert contexts[0].answers(method, PROMPTS, max_new_tokens=4) == together[:3]


OPTIONS = [{"repetition_penalty": 5.0}, {"num_beams": 2, "eos_token_id": [5, 9], "length_penalty": 2.0},
           {"min_new_tokens": 4, "eos_token_id": list(range(2, 40, 3))},
           {"eos_token_id": list(range(2, 40, 3)), "pad_token_id": 60}]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_early_ends_penalties_and_beams_equal_single_questions(options):
    ours = encoder()
    contexts = contexts_of(ours)
    together = answers(contexts, InfoFlowKV(recompute=0.4), PROMPTS, max_new_tokens=6, **options)
    assert together == alone(contexts, InfoFlowKV(recompute=0.4), PROMPTS, max_new_tokens=6, **options)


def test_beams_of_recomputed_contexts_equal_the_full_prefill():
    ours = encoder("qwen3", "yarn")
    contexts = contexts_of(ours)
    ids = [torch.cat([context.ids, ours.tokens(prompt)]) for context, prompt in zip(contexts, PROMPTS, strict=True)]
    options = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 3}
    full = [text for one in ids for text in ours.generate([one], **options)]
    assert ours.generate(ids, **options) == full
    assert answers(contexts, FullPrefill(), PROMPTS, **options) == full
    assert len(full) == 9


def test_several_texts_of_a_prompt_are_sampled_from_its_context():
    ours = encoder()
    contexts = contexts_of(ours)
    options = {"num_return_sequences": 5, "do_sample": True, "max_new_tokens": 6}
    assert len(set(answers(contexts, NoRecompute(), PROMPTS, **options))) > 10
    greedy = answers(contexts, NoRecompute(), PROMPTS, top_k=1, **options)
    assert greedy == [text for text in answers(contexts, NoRecompute(), PROMPTS, max_new_tokens=6) for _ in range(5)]


@pytest.mark.slow
def test_long_answers_of_a_batch_make_room():
    ours = encoder(max_position_embeddings=1024, num_hidden_layers=1)
    contexts = contexts_of(ours)[:2]
    patched = patch_batch(contexts, [ours.tokens(prompt) for prompt in PROMPTS[:2]], [NoRecompute()] * 2)
    assert patched.generate(max_new_tokens=240) == alone(contexts, NoRecompute(), PROMPTS[:2], max_new_tokens=240)


def test_threads_with_batches_of_the_same_contexts_get_the_answers_of_one_thread():
    contexts, found = contexts_of(encoder("qwen3", dtype=torch.float32)), {}

    def ask(thread):
        found[thread] = [answers(contexts, InfoFlowKV(), PROMPTS, max_new_tokens=4) for _ in range(4)]

    ask("alone")
    workers = [Thread(target=ask, args=(thread,)) for thread in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 5
    assert all(texts == found["alone"] for texts in found.values())


def test_batches_that_do_not_match_are_refused():
    ours = encoder()
    contexts = contexts_of(ours)
    for given, prompts, message in (
        (contexts, PROMPTS[:2], "2 prompts need one context each, of one encoder, not 3 contexts of 1"),
        ([contexts[0], contexts_of(encoder())[0]], PROMPTS[:2], "not 2 contexts of 2"),
        (contexts, "w20", "pass a list of prompts"),
        (contexts, ["w20", "", "w20"], "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            answers(given, NoRecompute(), prompts)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        answers(contexts, NoRecompute(), PROMPTS, batch_size=0)
    assert answers([], NoRecompute(), []) == []
