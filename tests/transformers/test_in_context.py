"""Laws of the hosts of blocks: one block is plain concatenation, several follow the formulas."""

import pytest
import torch
from tiny_lm import language_model, tokenizer
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

from foveate.transformers.in_context import concatenate, ensemble, parallel_windows, prompt_with

START = [1]
BLOCKS = [[[5, 6, 7], [8, 9]], [[10, 11, 12, 13]], [[14, 15], [16, 17, 18]]]
QUESTION, ANSWERS = [20, 21], [[30], [31, 32], [33]]


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config).double().eval()


def tokens(blocks):
    return [token for block in blocks for example in block for token in example]


def plain(model, blocks, question=QUESTION, answers=ANSWERS, start=START):
    """Log-probabilities of the answers, each by one forward pass of all tokens."""
    scores = []
    for answer in answers:
        text = [*start, *tokens(blocks), *question, *answer]
        with torch.no_grad():
            said = model(torch.tensor([text])).logits[0].log_softmax(-1)
        scores.append(sum(said[len(text) - len(answer) - 1 + i, token] for i, token in enumerate(answer)))
    return torch.stack(scores).log_softmax(0)


@pytest.mark.parametrize("make", [language_model, gpt2])
def test_concatenation_is_one_text(make):
    model = make()
    context = concatenate(model, BLOCKS, START)
    with torch.no_grad():
        want = model(torch.tensor([[*START, *tokens(BLOCKS), *QUESTION]])).logits[:, -2:]
    assert torch.allclose(context.logits(torch.tensor([QUESTION])), want)
    assert torch.allclose(context.logits(torch.tensor([QUESTION]), keep=1), want[:, -1:])
    assert torch.allclose(context.logits(torch.tensor([QUESTION]), keep=torch.tensor([1, 0])), want.flip(1))
    assert torch.allclose(context.score(QUESTION, ANSWERS), plain(model, BLOCKS))
    assert torch.allclose(context.score(QUESTION, ANSWERS), plain(model, BLOCKS))  # the context is unchanged
    assert torch.allclose(context.score([22], ANSWERS), plain(model, BLOCKS, [22]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen2"])
def test_sliding_layers_see_the_tokens_in_their_window(family, attention):
    model = sliding(family)
    if family != "gpt_oss":  # which is eager
        model.set_attn_implementation(attention)
    assert torch.allclose(concatenate(model, BLOCKS, START).score(QUESTION, ANSWERS), plain(model, BLOCKS))
    one = parallel_windows(model, [[example for block in BLOCKS for example in block]], START)
    assert torch.allclose(one.score(QUESTION, ANSWERS), plain(model, BLOCKS))
    windows = [[[2 + i, 3 + i, 4 + i]] for i in range(5)]  # more tokens than the window, at positions within it
    scores = [parallel_windows(model, some).score([20], ANSWERS) for some in (windows, windows[::-1])]
    assert torch.allclose(*scores)


@pytest.mark.parametrize("make", [language_model, gpt2])
@pytest.mark.parametrize("start", [START, []])
def test_one_window_is_concatenation(make, start):
    model, one = make(), [[example for block in BLOCKS for example in block]]
    for question in (QUESTION, [22]):
        text = torch.tensor([question])
        want = concatenate(model, BLOCKS, start).logits(text)
        assert torch.equal(parallel_windows(model, one, start).logits(text), want)


@pytest.mark.parametrize("make", [language_model, gpt2])
def test_windows_attend_to_themselves_and_the_start_and_the_question_to_all(make):
    """Compared with one forward pass of all tokens, with a dense mask and explicit positions."""
    model = make()
    parts = [START, *(tokens([block]) for block in BLOCKS), QUESTION]
    window = torch.tensor([i for i, part in enumerate(parts) for _ in part])
    longest = max(map(len, parts[1:-1]))
    firsts = [0, 1, 1, 1, 1 + longest]
    positions = torch.tensor([first + i for first, part in zip(firsts, parts, strict=True) for i in range(len(part))])
    sees = (window[:, None] == window) | (window == 0) | (window[:, None] == len(parts) - 1)
    mask = torch.zeros(len(window), len(window), dtype=torch.float64)
    mask.masked_fill_(~(sees & torch.ones_like(sees).tril()), torch.finfo(torch.float64).min)
    with torch.no_grad():
        want = model(
            torch.tensor([[token for part in parts for token in part]]),
            attention_mask=mask[None, None],
            position_ids=positions[None],
        ).logits[:, -2:]
    assert torch.allclose(parallel_windows(model, BLOCKS, START).logits(torch.tensor([QUESTION])), want)


def test_an_ensemble_of_one_block_is_concatenation():
    model = language_model()
    scores = [concatenate(model, BLOCKS, START).score(QUESTION, ANSWERS)]
    for mix in ("moe", "poe", "max"):
        assert torch.allclose(ensemble(scores, [1.0], mix), plain(model, BLOCKS).exp())


def test_mixes_follow_their_formulas():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    w = torch.tensor([0.25, 0.75], dtype=torch.float64)
    product = (p[0] ** 0.25) * (p[1] ** 0.75)
    assert torch.allclose(ensemble(list(p.log()), w), 0.25 * p[0] + 0.75 * p[1])
    assert torch.allclose(ensemble(list(p.log()), [1, 3], "poe"), product / product.sum())
    largest = torch.maximum(0.25 * p[0], 0.75 * p[1])
    assert torch.allclose(ensemble(list(p.log()), w, "max"), largest / largest.sum())
    assert torch.allclose(ensemble(list(p.log())), p.mean(0))


def test_similar_answers_differ_in_half_precision():
    """Log-probabilities near 12 may differ by a hundredth, but bfloat16 has steps of 1/16 there."""
    model = language_model().to(torch.bfloat16)
    context = concatenate(model, BLOCKS, START)
    logits = context.logits(torch.tensor([[*QUESTION, answer] for answer in range(30, 38)]))[0, len(QUESTION) - 1]
    want = logits.double()[30:38].log_softmax(0)
    found = context.score(QUESTION, [[answer] for answer in range(30, 38)])
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)


def sliding(family):
    """A model some of whose layers see a window of 6 tokens."""
    if family != "qwen2":
        return language_model(family)
    kinds = 2 * ["full_attention", "sliding_attention"]
    return language_model("qwen2", use_sliding_window=True, sliding_window=6, layer_types=kinds)


ROPE = {"rope_type": "longrope", "rope_theta": 100.0, "long_factor": [2.0] * 4, "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32}  # fmt: skip
LAYERS = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
FALCON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "alibi": True}


@pytest.mark.parametrize(
    ("make", "has"),
    [
        (lambda: language_model(rope_parameters=ROPE), " .it has longrope."),
        (lambda: GPTNeoForCausalLM(GPTNeoConfig(vocab_size=40, **LAYERS)), " .it has local."),
        (lambda: FalconForCausalLM(FalconConfig(vocab_size=40, **FALCON)), " .it has alibi."),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)), ""),
        (lambda: language_model("mistral", sliding_window=8), ""),
    ],
)
def test_models_with_layers_that_do_not_attend_to_all_previous_tokens_are_refused(make, has):
    with pytest.raises(ValueError, match=f"does not take blocks: .* takes position_ids and logits_to_keep{has}$"):
        concatenate(make().eval(), BLOCKS)


@pytest.mark.usefixtures("as_a_user")
def test_bad_blocks_questions_and_weights_are_refused():
    model = language_model()
    with pytest.raises(ValueError, match=r"in training mode, .* call model\.eval"):
        concatenate(language_model().train(), BLOCKS)
    for blocks in ([BLOCKS[0], []], [BLOCKS[0], [[]]]):
        with pytest.raises(ValueError, match="block 1 is empty"):
            parallel_windows(model, blocks)
    with pytest.raises(ValueError, match="nothing to read"):
        concatenate(model, [])
    with pytest.raises(ValueError, match="nothing to read"):
        parallel_windows(model, [])
    with pytest.raises(ValueError, match="at least one token"):
        concatenate(model, BLOCKS).score([], ANSWERS)
    scores = list(torch.zeros(2, 3))
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="2 blocks need 2 weights of 0 or more"):
            ensemble(scores, weights)
    with pytest.raises(ValueError, match="one of moe, poe, max, not 'mean'"):
        ensemble(scores, None, "mean")
    with pytest.raises(ValueError, match="at least one block"):
        ensemble([])


TEXTS = [["w1 w2", "w3"], ["w4 w5 w6"]]
QUESTION_TEXT, CHOICES = "w7 w8", ["w9", "w10 w11", "w12"]


def test_texts_are_scored_like_their_tokens_and_blocks_are_weighted():
    model, ids = language_model(), lambda text: tokenizer()(text, add_special_tokens=False).input_ids
    blocks, answers = [[ids(text) for text in block] for block in TEXTS], list(map(ids, CHOICES))
    whole = prompt_with(model, tokenizer(), TEXTS, "concatenate").probabilities(QUESTION_TEXT, CHOICES, torch.ones(2))
    assert torch.allclose(whole, plain(model, blocks, ids(QUESTION_TEXT), answers, [0]).exp())
    mixed = prompt_with(model, tokenizer(), TEXTS, "ensemble").probabilities(
        QUESTION_TEXT, CHOICES, torch.tensor([1.0, 3.0])
    )
    first, second = (plain(model, [block], ids(QUESTION_TEXT), answers, [0]).exp() for block in blocks)
    assert torch.allclose(mixed, 0.25 * first + 0.75 * second)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("host", ["concatenate", "ensemble", "parallel_windows"])
def test_one_block_generates_the_same_text_as_the_model(host, seed):
    model = language_model(seed=seed)
    model.generation_config.eos_token_id = 1  # the first token of the model with seed 0
    reader = prompt_with(model, tokenizer(), [["w1 w2", "w3"]], host)
    ids = torch.tensor([[0, *tokenizer()("w1 w2 w3 w7 w8", add_special_tokens=False).input_ids]])
    want = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    assert reader.generate(QUESTION_TEXT, 5) == tokenizer().decode(want, skip_special_tokens=True).strip()
    assert (want[0] == 1) == (seed == 0)


@pytest.mark.parametrize("ends", ["one", "list"])
def test_an_answer_ends_at_every_end_token_of_the_model(ends):
    model = language_model(seed=2)
    reader = prompt_with(model, tokenizer(), [["w1 w2", "w3"]], "concatenate")
    whole = reader.generate(QUESTION_TEXT, 5).split()
    (end,) = tokenizer()(whole[1], add_special_tokens=False).input_ids
    model.generation_config.eos_token_id = end if ends == "one" else [1, end]
    assert reader.generate(QUESTION_TEXT, 5).split() == whole[:1]


class Lines:
    """A tokenizer whose every second token is the end of a line."""

    bos_token_id = eos_token_id = None

    def __call__(self, text, add_special_tokens):
        return tokenizer()(text, add_special_tokens=False)

    def decode(self, tokens, skip_special_tokens=False):
        return "".join("\n" if i % 2 == 1 else f"{token}" for i, token in enumerate(tokens))


def test_an_answer_ends_with_its_line():
    reader = prompt_with(language_model(seed=2), tokenizer(), [["w1 w2"]], "concatenate")
    assert len(reader.generate(QUESTION_TEXT, 5).split()) == 5
    answer = reader._replace(tokenizer=Lines()).generate(QUESTION_TEXT, 5)
    assert answer.isdigit()


def test_texts_longer_than_the_context_of_the_model_are_refused(as_a_user):
    model, many = language_model(max_position_embeddings=8), [["w1 w2 w3"]] * 3
    with pytest.raises(ValueError, match="10 tokens are more than the 8 that the model's context holds"):
        prompt_with(model, tokenizer(), many, "concatenate")
    reader = prompt_with(model, tokenizer(), many, "parallel_windows")
    with pytest.raises(ValueError, match="9 tokens are more than the 8"):
        reader.probabilities("w1 w2 w3 w4", ["w5"])
    with pytest.raises(ValueError, match="host must be one of concatenate, ensemble, parallel_windows, not 'all'"):
        prompt_with(model, tokenizer(), many, "all")
    assert concatenate(model, [[[5, 6, 7]]]).position == 3
