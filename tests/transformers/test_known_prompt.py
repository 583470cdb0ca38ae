"""Laws of prompts that begin with passages of an index: how they are matched, and their rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_lm import DOCUMENTS, encoder
from transformers import DynamicCache

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend, FullPrefill, NoRecompute
from foveate.transformers.attention import CACHE
from foveate.transformers.index import ChunkIndex
from foveate.transformers.known_prompt import KnownPrompt, PromptMatcher, paged_slots

PREFIX = [0, 9]
PASSAGES = [[1, 2], [3], [1, 2, 4], [4, 4, 4, 4], []]


@pytest.fixture
def matcher():
    return PromptMatcher(PREFIX, PASSAGES, longest=16)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    index = ChunkIndex(tmp_path_factory.mktemp("index"), encoder())
    return index.add({f"{number}.txt": text for number, text in enumerate(DOCUMENTS)}, max_tokens=0)


def known(index, passages, question="w20 w21 w22"):
    ids = [token for number in passages for token in index.ids[number]]
    tokens = index.encoder.prefix.tolist() + ids + index.encoder.tokens(question).tolist()
    return PromptMatcher(index.encoder.prefix.tolist(), index.ids, longest=128).match(tokens)


@given(st.lists(st.sampled_from([[1, 2], [3], [4, 4, 4, 4]]), min_size=1, max_size=3))
def test_passages_are_found_in_any_order_and_the_question_remains(passages):
    matcher = PromptMatcher(PREFIX, [[1, 2], [3], [4, 4, 4, 4]], longest=16)
    ids = PREFIX + [token for passage in passages for token in passage]
    prompt = matcher.match([*ids, 8])
    assert prompt.ids == (*ids, 8)
    assert prompt.rows == len(ids)
    assert [list(prompt.ids[start:stop]) for start, stop in prompt.spans] == passages


def test_the_longest_passage_is_found(matcher):
    assert matcher.match([*PREFIX, 1, 2, 4, 3, 7, 1, 2]).spans == ((2, 5), (5, 6))


def test_the_last_token_belongs_to_the_question(matcher):
    assert matcher.match([*PREFIX, 1, 2, 4]).spans == ((2, 4),)
    assert matcher.match([*PREFIX, 3]) is None


@pytest.mark.parametrize("ids", [[], [0], [0, 1, 2, 7], [*PREFIX, 7, 3, 7], [*PREFIX, 1, 7], [*PREFIX, *[3] * 15]])
def test_prompts_without_passages_do_not_match(matcher, ids):
    assert matcher.match(ids) is None


@pytest.mark.parametrize("method", [EPIC(), CacheBlend(recompute=0.4), InfoFlowKV(recompute=0.4), NoRecompute()])
def test_rows_equal_the_rows_of_the_context(index, method):
    keys, values = known(index, [2, 0, 3]).compose(index, method)
    context = index.encoder.compose(index.load([2, 0, 3]))
    with context.patch(method, "w20 w21 w22") as patched:
        for layer, key, value in zip(patched.cache().layers, keys, values, strict=True):
            assert torch.equal(layer.keys[0].transpose(0, 1), key)
            assert torch.equal(layer.values[0].transpose(0, 1), value)


@pytest.mark.parametrize("method", [EPIC(recompute=1.0), InfoFlowKV(recompute=1.0), FullPrefill()])
def test_recomputing_all_rows_gives_the_rows_of_the_model(index, method):
    prompt = known(index, [1, 2])
    with torch.no_grad():
        index.encoder.model(torch.tensor([prompt.ids[: prompt.rows]]), **{CACHE: (cache := DynamicCache())})
    for layer, key, value in zip(cache.layers, *prompt.compose(index, method), strict=True):
        torch.testing.assert_close(layer.keys[0].transpose(0, 1), key)
        torch.testing.assert_close(layer.values[0].transpose(0, 1), value)


def test_a_passage_that_the_index_lacks_is_an_error(index):
    prompt = known(index, [1, 2])
    other = KnownPrompt((*prompt.ids[:3], 1, *prompt.ids[4:]), prompt.spans)
    with pytest.raises(ValueError, match="lacks 1 of 2 passages"):
        other.compose(index, EPIC())


def test_prompts_share_only_equal_rows(index):
    prompts = [known(index, [2, 0]), known(index, [2, 0], "w1"), known(index, [2]), known(index, [0, 2])]
    epic, other, ours = (
        [prompt.salt(method) for prompt in prompts] for method in (EPIC(), EPIC(recompute=0.3), InfoFlowKV())
    )
    assert epic[0] == epic[1] == known(index, [2, 0]).salt(EPIC())
    assert len({*epic, *other, *ours}) == 3 + 3 + 4


@given(st.permutations(range(5)), st.integers(1, 4), st.data())
def test_rows_are_in_the_slots_of_the_block_table(blocks, size, data):
    count = data.draw(st.integers(1, 5 * size))
    start = data.draw(st.integers(0, count - 1))
    cache = torch.full((5, size), -1)
    cache.view(-1)[paged_slots(blocks, size, start, count)] = torch.arange(start, count)
    text = cache[torch.tensor(blocks)].flatten()
    assert text[start:count].tolist() == list(range(start, count))
    assert (text[:start] == -1).all()
    assert (text[count:] == -1).all()
