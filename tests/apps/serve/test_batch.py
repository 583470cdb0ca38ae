"""Laws of batches that answers join between tokens, in float64 with tiny models."""

from functools import partial

import pytest
import tiny_lm

from foveate import InfoFlowKV
from foveate.apps.serve.batch import Batch, Joining
from foveate.apps.serve.completion import Completion
from foveate.apps.serve.question_queue import PendingQuestion
from foveate.transformers import ChunkEncoder

METHOD = InfoFlowKV(recompute=0.3, scoring_layers=(1,))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_answers_that_join_and_leave_between_tokens_are_those_of_each_alone(family, device):
    lm, tokenizer = tiny_lm.language_model(family).to(device), tiny_lm.tokenizer()
    lm.generation_config.eos_token_id, lm.generation_config.pad_token_id = 1, 1
    lm.generation_config.suppress_tokens = [1]  # all answers are as long as they may be
    encoder = ChunkEncoder(lm, tokenizer)
    chunks = encoder.encode(tiny_lm.DOCUMENTS)

    def joining(number, new_tokens):
        asked = Completion.model_validate({"messages": [{"role": "user", "content": "a"}]})
        context = encoder.compose([chunks[number % 4], chunks[(number + 1) % 4]])
        prompt = encoder.tokens(tiny_lm.PROMPTS[number % 3])
        return Joining(PendingQuestion(asked), [], context, prompt, new_tokens)

    def generated(plan):
        """Texts of answers that join in groups, one group after each pair of tokens."""
        batch, groups = Batch(encoder, METHOD), [*plan]
        while groups or batch.unfinished:
            batch.join(groups.pop(0) if groups else ())
            batch.generate(partial(next, iter([False, True])) if groups else lambda: False)
            assert bool(batch.unfinished) == bool(groups)  # others join before these answers end
        return [joined.question.outcome.result() for group in plan for joined in group]

    lengths = [2, 6, 9, 5, 1, 7]  # the first to end is not the last row
    alone = [generated([[joining(number, most)]])[0] for number, most in enumerate(lengths)]
    first, second, third, *others = [joining(number, most) for number, most in enumerate(lengths)]
    assert generated([[first, second], [third], others]) == alone
    again = [joining(number, most) for number, most in enumerate(lengths)]  # with the recorded graphs on a GPU
    assert generated([again[:2], again[2:3], again[3:]]) == alone
    assert [outcome.completion for outcome in alone] == lengths
