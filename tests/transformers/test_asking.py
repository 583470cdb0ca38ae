"""Laws of questions in text: they are scores of token ids, and an answer is written token by token by all blocks."""

import pytest
import torch
from tiny_lm import language_model, tokenizer

from foveate.transformers.asking import read_examples
from foveate.transformers.in_context import concatenate

BLOCKS = [["w1 w2", "w3"], ["w4 w5 w6"]]
QUESTION, ANSWERS = "w7 w8", ["w9", "w10 w11", "w12"]


def scores(model, words, tokens):
    """By one forward of all tokens: log-probabilities of what comes next, and of the answers."""
    ids = [0, *tokens(" ".join(words)), *tokens(QUESTION)]
    found = []
    for answer in map(tokens, ANSWERS):
        with torch.no_grad():
            said = model(torch.tensor([ids + answer])).logits[0].log_softmax(-1)
        found.append(sum(said[len(ids) - 1 + i, token] for i, token in enumerate(answer)))
    return torch.stack(found).log_softmax(0)


def test_answers_are_scored_as_by_one_forward_and_blocks_are_weighted():
    model, tokens = language_model(), lambda text: tokenizer()(text, add_special_tokens=False).input_ids
    texts = [text for block in BLOCKS for text in block]
    whole = read_examples(model, tokenizer(), BLOCKS, "concatenate").choose(QUESTION, ANSWERS, torch.ones(2))
    assert torch.allclose(whole, scores(model, texts, tokens).exp())
    mixed = read_examples(model, tokenizer(), BLOCKS, "ensemble").choose(QUESTION, ANSWERS, torch.tensor([1.0, 3.0]))
    apart = [scores(model, block, tokens).exp() for block in BLOCKS]
    assert torch.allclose(mixed, 0.25 * apart[0] + 0.75 * apart[1])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("host", ["concatenate", "ensemble", "parallel_windows"])
def test_one_block_writes_what_the_model_generates_until_it_ends(host, seed):
    model = language_model(seed=seed)
    model.generation_config.eos_token_id = 1  # what the model of the first seed says at once
    reader = read_examples(model, tokenizer(), [["w1 w2", "w3"]], host)
    ids = torch.tensor([[0, *tokenizer()("w1 w2 w3 w7 w8", add_special_tokens=False).input_ids]])
    want = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    assert reader.write(QUESTION, 5) == tokenizer().decode(want, skip_special_tokens=True).strip()
    assert (want[0] == 1) == (seed == 0)


@pytest.mark.parametrize("ends", ["one", "list"])
def test_an_answer_ends_at_each_end_of_the_models(ends):
    model = language_model(seed=2)
    reader = read_examples(model, tokenizer(), [["w1 w2", "w3"]], "concatenate")
    whole = reader.write(QUESTION, 5).split()
    (end,) = tokenizer()(whole[1], add_special_tokens=False).input_ids
    model.generation_config.eos_token_id = end if ends == "one" else [1, end]
    assert reader.write(QUESTION, 5).split() == whole[:1]


class Lines:
    """A tokenizer whose every second token is the end of a line."""

    bos_token_id = eos_token_id = None

    def __call__(self, text, add_special_tokens):
        return tokenizer()(text, add_special_tokens=False)

    def decode(self, tokens, skip_special_tokens=False):
        return "".join("\n" if i % 2 == 1 else f"{token}" for i, token in enumerate(tokens))


def test_an_answer_is_a_line():
    reader = read_examples(language_model(seed=2), tokenizer(), [["w1 w2"]], "concatenate")
    assert len(reader.write(QUESTION, 5).split()) == 5
    answer = reader._replace(tokenizer=Lines()).write(QUESTION, 5)
    assert answer.isdigit()


def test_what_does_not_fit_the_model_is_refused():
    model, many = language_model(max_position_embeddings=8), [["w1 w2 w3"]] * 3
    with pytest.raises(ValueError, match="10 tokens are more than the 8 that the model's context holds"):
        read_examples(model, tokenizer(), many, "concatenate")
    reader = read_examples(model, tokenizer(), many, "parallel_windows")
    with pytest.raises(ValueError, match="9 tokens are more than the 8"):
        reader.choose("w1 w2 w3 w4", ["w5"])
    with pytest.raises(ValueError, match="unknown host 'all': choose one of concatenate, ensemble, parallel_windows"):
        read_examples(model, tokenizer(), many, "all")
    assert concatenate(model, [[[5, 6, 7]]]).position == 3
