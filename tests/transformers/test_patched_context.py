"""Laws of patched contexts: exact at both ends, causal, scored as defined, and independent."""

from itertools import product
from random import Random
from threading import Thread

import pytest
import torch
from tiny_lm import (
    DOCUMENTS,
    PAIRS,
    PROMPTS,
    cached_logits,
    encoder,
    full_logits,
    language_model,
    tokenizer,
)
from transformers import GenerationConfig

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute, RandomRows
from foveate.methods.recompute_policy import RecomputePolicy, places
from foveate.transformers import ChunkEncoder, row_cache
from foveate.transformers.attention import CACHE, capture_unrotated_keys

METHODS = [InfoFlowKV(), InfoFlowKV(reorder=True, recompute=0.4), InfoFlowKV(norm="l1", geometry="hl-hp"),
           RandomRows(), EPIC(), CacheBlend(), CacheBlend(rank="k"), FullPrefill(), NoRecompute()]  # fmt: skip


def composed(ours, documents=DOCUMENTS):
    return ours.compose(ours.encode(documents))


def copies(context):
    """Keys, then values, of each layer of a context or a patched context."""
    layers = context.cache().layers
    return [*(layer.keys for layer in layers), *(layer.values for layer in layers)]


def recomputed(context, rows):
    with context.recompute(rows, PROMPTS[0]) as patched:
        return copies(patched)


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_near(first, second, tolerance):
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("family", "rope"), PAIRS)
def test_recomputing_all_rows_is_the_full_prefill(family, rope):
    context = composed(encoder(family, rope))
    tolerance = 1e-6 if family.startswith("cohere") else 1e-12  # Cohere rotates in float32 whatever the dtype
    for method in (InfoFlowKV(recompute=1.0), InfoFlowKV(recompute=1.0, exclude_first=False), FullPrefill()):
        with context.patch(method, PROMPTS[1]) as patched:
            full = full_logits(context.lm, context, PROMPTS[1])
            for ours in (patched.logits(), cached_logits(context.lm, patched, PROMPTS[1])):
                torch.testing.assert_close(ours, full, rtol=0, atol=tolerance)
            assert abs(patched.fidelity()) < 1e-5
    assert (cached_logits(context.lm, context, PROMPTS[1]) - full_logits(context.lm, context, PROMPTS[1])
            ).abs().max() > 0.01  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.09)]
)
def test_other_dtypes_are_exact_to_their_rounding(dtype, tolerance):
    context = composed(encoder("qwen3", "yarn", dtype=dtype))
    with context.patch(InfoFlowKV(recompute=1.0), PROMPTS[1]) as patched:
        ours = patched.logits()
        full = full_logits(context.lm, context, PROMPTS[1])
        assert ours.dtype == dtype
        assert (ours - full).abs().max() < tolerance * full.abs().max()


def test_the_full_prefill_gives_the_answer_of_the_model_alone():
    ours = encoder("qwen2", "llama3")
    context = composed(ours)
    ids = torch.cat([context.ids, ours.tokens(PROMPTS[1])])[None]
    alone = ours.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    with context.patch(InfoFlowKV(recompute=1.0), PROMPTS[1]) as patched:
        assert patched.generate(max_new_tokens=12) == ours.tokenizer.decode(alone[0, ids.shape[1] :])


@pytest.mark.parametrize("own", [{}, {"use_cache": False}, {"return_dict_in_generate": True}], ids=repr)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=repr)
def test_generation_configs_about_the_cache_do_not_change_the_answer(own, options):
    ours = encoder()
    context = composed(ours)
    full = ours.generate([torch.cat([context.ids, ours.tokens(PROMPTS[1])])], max_new_tokens=12)[0]
    ours.model.generation_config.update(**own)
    with context.patch(InfoFlowKV(recompute=1.0), PROMPTS[1]) as patched:
        assert patched.generate(max_new_tokens=12, **options) == full
    assert ours.generate([torch.cat([context.ids, ours.tokens(PROMPTS[1])])], max_new_tokens=12, **options)[0] == full


def test_options_that_a_context_does_not_support_are_refused():
    ours = encoder()
    context = composed(ours)
    ids = torch.cat([context.ids, ours.tokens(PROMPTS[1])])
    with context.patch(NoRecompute(), PROMPTS[1]) as patched:
        for option in ({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3},
                       {"assistant_model": ours.model}, {"prefill_chunk_size": 2}):  # fmt: skip
            with pytest.raises(ValueError, match=f"does not support {next(iter(option))}: pass .*=None, not "):
                patched.generate(**option)
        both = patched.generate, lambda **options: ours.generate([ids], **options)
        for option in ({"generation_config": GenerationConfig(max_new_tokens=3)}, {"return_dict_in_generate": True}):
            for generate in both:
                with pytest.raises(ValueError, match="leave out generation_config and return_dict_in_generate"):
                    generate(**option)
        for option in ({CACHE: context.cache()}, {"attention_mask": torch.ones(1, 9)}):
            for generate in both:
                with pytest.raises(ValueError, match=f"leave out {next(iter(option))}: context and prompt set"):
                    generate(**option)
        with pytest.raises(ValueError, match=r"one text: use context\.answers"):
            patched.generate(num_return_sequences=2, do_sample=True)
    with pytest.raises(ValueError, match="need eos_token_id, which pads the texts that end first"):
        context.answers(NoRecompute(), PROMPTS, stop_strings=["w3"])


@pytest.mark.parametrize("prefix", ["<s> w60", ""])
def test_recomputing_no_rows_is_plain_concatenation(prefix):
    ours = encoder(prefix=prefix)
    context = composed(ours)
    before = copies(context)
    with context.patch(InfoFlowKV(recompute=0.0), PROMPTS[0]) as patched:
        assert not len(patched.rows)
        assert same(copies(patched), before)
    skip = len(ours.prefix)
    values = [chunk.values[:, :, 0 if i == 0 else skip :] for i, chunk in enumerate(context.chunks)]
    assert torch.equal(context.values, torch.cat(values, dim=2)[:, None])
    assert torch.equal(context.keys, context.keys_at(torch.arange(len(context))))


def test_layer_0_is_exact_and_layer_1_where_it_was_recomputed():
    context = composed(encoder("mistral"))
    stale = copies(context)
    layers = len(context.keys)
    rows = torch.tensor([11, 14, 20, 25])
    ours, full = recomputed(context, rows), recomputed(context, torch.arange(len(context)))
    for kind in (0, layers):  # keys, values
        torch.testing.assert_close(stale[kind], full[kind], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours[kind + 1][:, :, rows], full[kind + 1][:, :, rows], rtol=1e-12, atol=1e-12)
        assert (stale[kind + 1] - full[kind + 1])[:, :, rows].abs().max() > 0.01


def test_recomputing_the_first_chunk_changes_nothing():
    context = composed(encoder("qwen3"))
    before = copies(context)
    assert_near(recomputed(context, torch.arange(*context.spans[0])), before, 1e-12)


def test_no_row_depends_on_later_rows():
    context = composed(encoder())
    rows, place = torch.tensor([10, 13, 17, 21, 27]), 17
    ours = recomputed(context, rows)
    context.ids[place + 1 :] = 5
    for tensor in (context.keys, context.values):
        tensor[..., place + 1 :, :] = 7.0
    for now, before in zip(recomputed(context, rows), ours, strict=True):
        assert torch.equal(now[:, :, : place + 1], before[:, :, : place + 1])
        assert not torch.equal(now[:, :, 21], before[:, :, 21])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_order_of_rows_and_the_slices_do_not_matter(implementation, monkeypatch):
    context = composed(encoder(attn_implementation=implementation))
    rows = torch.tensor([10, 13, 17, 21, 27])
    ours = recomputed(context, rows)
    monkeypatch.setattr(row_cache, "RECOMPUTE_ROWS", 2)
    assert_near(recomputed(context, rows.flip(0)), ours, 1e-6)


@pytest.mark.parametrize(
    ("family", "norm", "geometry"),
    [
        *product(["qwen3"], ["l2", "l1"], ["global", "hl-hp", "tl-tp", "hl-tp"]),
        ("gpt_oss", "l2", "global"),
        ("gemma3", "l1", "global"),
    ],
)
def test_scores_are_the_attention_weights_of_the_model(family, norm, geometry):
    """Compared with the attention weights of the model, in a forward pass over the composed cache."""
    ours = encoder(family, "yarn", attn_implementation="eager")
    context, layers = composed(ours), (1, 2)
    before = copies(context)
    scores = context.score(PROMPTS[1], layers, norm, geometry)
    assert same(copies(context), before)
    positions, start = places(geometry, context.spans)
    context.keys = context.keys_at(positions)
    prompt = ours.tokens(PROMPTS[1])
    at = torch.arange(start, start + len(prompt))[None]
    with torch.no_grad():
        output = ours.model(input_ids=prompt[None], position_ids=at, **{CACHE: context.cache()},
                            output_attentions=True)  # fmt: skip
    attention = torch.stack([output.attentions[layer][0].mean(0)[:, : len(context)] for layer in layers])
    expected = attention.norm(dim=1).mean(0) if norm == "l2" else attention.sum(1).mean(0)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)


class Watching(RecomputePolicy):
    """A policy that records the deviations, and recomputes nothing."""

    def __init__(self, rank):
        self.rank = rank

    def rows(self, stale):
        self.found = stale.kv_deviation(self.rank)
        return torch.empty(0, dtype=torch.long)


def test_kv_deviation_is_the_change_of_layer_1_in_a_full_prefill():
    context = composed(encoder("llama", "llama3"))
    layers = len(context.keys)
    stale = copies(context)
    full = recomputed(context, torch.arange(len(context)))
    for rank, layer in (("k", 1), ("v", layers + 1)):
        expected = (full[layer] - stale[layer]).square().mean((0, 1, 3)).float()
        context.patch(policy := Watching(rank), PROMPTS[0]).close()
        torch.testing.assert_close(policy.found, expected, rtol=1e-5, atol=1e-6)
        assert same(copies(context), stale)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_patch_does_not_change_the_context(method):
    context = composed(encoder())
    before, ids = copies(context), context.ids.clone()
    with context.patch(method, PROMPTS[1]) as patched:
        text = patched.generate(max_new_tokens=4)
        assert patched.generate(max_new_tokens=4) == text
        assert f"{len(patched.rows)} of {len(context)} rows recomputed" in patched.summary()
        for chunk, (start, stop) in zip(patched.order, patched.context.spans, strict=True):
            assert torch.equal(patched.context.ids[start:stop], context.chunks[chunk].ids)
    assert torch.equal(context.ids, ids)
    assert same(copies(context), before)
    with pytest.raises(ValueError, match="has been closed"):
        patched.generate()


def test_rows_may_be_chosen_by_the_question_alone():
    context = composed(encoder())
    method = InfoFlowKV(recompute=0.3)
    rows = []
    for prompt in (PROMPTS[2], PROMPTS[1]):
        with context.patch(method, prompt) as patched:
            rows.append(patched.rows.tolist())
    with context.patch(method, PROMPTS[1], question=PROMPTS[2]) as patched:
        assert patched.rows.tolist() == rows[0] != rows[1]
        assert torch.equal(patched.prompt, context.lm.tokens(PROMPTS[1]))
    with pytest.raises(ValueError, match="prompt is empty"):
        context.patch(method, PROMPTS[1], question="")


def test_patches_of_one_context_are_independent():
    context = composed(encoder())
    questions = [(method, prompt) for method in METHODS for prompt in PROMPTS]
    alone = []
    for method, prompt in questions:
        with context.patch(method, prompt) as patched:
            alone.append((copies(patched), patched.logits(), patched.generate(max_new_tokens=4)))
    together = [context.patch(method, prompt) for method, prompt in questions]
    for patched, (rows, logits, text) in zip(together, alone, strict=True):
        assert patched.generate(max_new_tokens=4) == text
        assert same([*copies(patched), patched.logits()], [*rows, logits])


def test_a_patch_generates_until_it_is_closed():
    context = composed(encoder())
    patched = context.patch(FullPrefill(), PROMPTS[0])
    rows = patched.cache()
    patched.close()
    patched.close()
    others = [context.patch(NoRecompute(), prompt) for prompt in PROMPTS]  # they use its memory
    assert not torch.equal(others[0].logits(), others[1].logits())
    for use in (patched.logits, patched.generate, patched.cache, patched.fidelity):
        with pytest.raises(ValueError, match="has been closed: patch the context again"):
            use()
    assert same([layer.keys for layer in rows.layers], recomputed(context, torch.arange(len(context)))[:4])


def test_answers_longer_than_the_room_after_the_prompt_are_the_same():
    ours = encoder(max_position_embeddings=1024, num_hidden_layers=1)
    long = composed(ours)
    with long.patch(InfoFlowKV(), PROMPTS[1]) as patched:
        text = patched.generate(max_new_tokens=300)
        assert patched.generate(max_new_tokens=300) == text
        assert text.startswith(patched.generate(max_new_tokens=20))
        ids = torch.cat([long.ids, patched.prompt])[None]
        alone = ours.model.generate(input_ids=ids, **{CACHE: patched.cache()}, max_new_tokens=300, do_sample=False)
    assert text == ours.tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("threads", [2, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_threads_that_share_a_context_get_the_answers_of_one_thread_bit_for_bit(threads, request):
    slow = request.node.get_closest_marker("slow")
    context, pool = composed(encoder("qwen3", "yarn", dtype=torch.float32)), Random(0)
    foreign = torch.randint(2, 64, (2, 9)), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])  # a padded batch

    def answer(question):
        method, prompt = question
        if method == "foreign":
            return context.lm.model(foreign[0], attention_mask=foreign[1]).logits
        if method == "score":
            return context.score(prompt, (1, 2))
        with context.patch(method, prompt) as patched:
            text = patched.generate(max_new_tokens=3)
            return torch.cat([torch.tensor([hash(text) % 997.0]), patched.logits().flatten()])

    questions = [
        (pool.choice([*METHODS, "score", "foreign"]), pool.choice(PROMPTS)) for _ in range(30 if slow else 12)
    ]
    with torch.no_grad():
        alone = [answer(question) for question in questions]
    found = {}

    def ask(thread):
        order = Random(thread).sample(range(len(questions)), len(questions))
        with torch.no_grad():
            found[thread] = {i: answer(questions[i]) for i in order}

    workers = [Thread(target=ask, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == threads
    for answers in found.values():
        assert same([answers[i] for i in range(len(questions))], alone)


def test_the_model_is_never_changed():
    model = language_model()

    def state():
        return model.config._attn_implementation, [len(module._forward_hooks) for module in model.modules()]

    before = state()
    ours = ChunkEncoder(model, tokenizer())
    assert all(a is b for a, b in zip(model.parameters(), ours.row_model.parameters(), strict=True))
    during = []
    hook = ours.row_model.model.layers[1].register_forward_hook(lambda *_: during.append(state()))
    context = composed(ours)
    with context.patch(InfoFlowKV(), PROMPTS[0]) as patched:
        patched.generate(max_new_tokens=3)
    hook.remove()
    assert len(during) > 4
    assert all(now == before for now in [*during, state()])


def test_threads_capture_only_the_keys_of_their_own_forward_pass():
    ours = encoder()
    with capture_unrotated_keys() as taken:
        other = Thread(target=lambda: ours.encode([DOCUMENTS[2]]))
        other.start()
        other.join()
        assert not taken
        ours.encode([DOCUMENTS[1]])
    assert not taken  # `encode` captures separately


def test_long_documents_are_encoded_in_parts_as_in_one(monkeypatch):
    ours = encoder()
    whole = ours.encode(DOCUMENTS)
    monkeypatch.setattr(row_cache, "RECOMPUTE_ROWS", 3)
    for a, b in zip(whole, ours.encode(DOCUMENTS), strict=True):
        assert_near([a.keys, a.values], [b.keys, b.values], 1e-12)


def test_fidelity_is_the_mean_divergence_from_the_full_prefill_over_the_prompt():
    context = composed(encoder("qwen2"))
    with context.patch(InfoFlowKV(recompute=0.2), PROMPTS[1]) as patched:
        p = full_logits(context.lm, context, PROMPTS[1]).softmax(-1)
        q = cached_logits(context.lm, patched, PROMPTS[1]).softmax(-1)
        divergence = [sum(a * (a / b).log() for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)]
        assert len(divergence) == 4
        assert patched.fidelity() == pytest.approx(float(sum(divergence) / 4), rel=1e-4)


@pytest.mark.parametrize("step", ["encode", "score", "recompute", "generate"])
def test_after_an_error_the_next_answer_is_right(step):
    context = composed(encoder())
    patched = context.patch(InfoFlowKV(), PROMPTS[0])
    before = patched.logits(), patched.generate()
    attempt = {
        "encode": lambda: context.lm.encode(["w1"]),
        "score": lambda: context.score("w20", [2]),
        "recompute": lambda: context.patch(FullPrefill(), PROMPTS[1]),
        "generate": patched.generate,
    }[step]
    hook = context.lm.row_model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attempt()
    hook.remove()
    for again in (patched, context.patch(InfoFlowKV(), PROMPTS[0])):
        assert torch.equal(again.logits(), before[0])
        assert again.generate() == before[1]


def test_a_document_may_occur_twice_or_alone():
    ours = encoder()
    (chunk,) = ours.encode([DOCUMENTS[0]])
    twice, alone = ours.compose([chunk, chunk]), ours.compose([chunk])
    assert torch.equal(twice.ids, torch.cat([ours.prefix, chunk.ids, chunk.ids]))
    with alone.patch(InfoFlowKV(), PROMPTS[0]) as patched:  # its cache is exact
        assert not len(patched.rows)
        assert abs(patched.fidelity()) < 1e-6


def test_bad_arguments_are_refused_with_the_value(as_a_user):
    context = composed(encoder())
    with pytest.raises(ValueError, match="numbered from 0 to 28, not 3 to 29"):
        context.recompute(torch.tensor([3, 29]), PROMPTS[0])
    with (
        context.patch(NoRecompute(), PROMPTS[0]) as patched,
        pytest.raises(ValueError, match="context, prompt and answer: 130 tokens, but the model takes at most 128"),
    ):
        patched.generate(max_new_tokens=100)
    for options, message in (
        ({"layers": [1, 4]}, r"layers must be some of 0 to 3, not \[1, 4\]"),
        ({"layers": []}, r"not \[\]"),
        ({"layers": [-1]}, r"not \[-1\]"),
        ({"layers": [1], "norm": "max"}, "norm must be one of l2, l1, entropy, not 'max'"),
        ({"layers": [1], "geometry": "locl"}, "geometry must be one of global, hl-hp, tl-tp, hl-tp, not 'locl'"),
    ):
        with pytest.raises(ValueError, match=message):
            context.score(PROMPTS[0], **options)
    with pytest.raises(ValueError, match="only layer 0"):
        composed(encoder(num_hidden_layers=1)).patch(CacheBlend(), PROMPTS[0])
