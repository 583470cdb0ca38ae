# pyright: basic, reportPrivateImportUsage=false
"""Concurrent questions to long contexts: time to the first token, and tokens a second."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from foveate.apps.bench.models import random_model
from foveate.apps.bench.table import TableColumn, milliseconds, results_table
from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill, NoRecompute
from foveate.methods.recompute_policy import RecomputePolicy
from foveate.transformers import ChunkEncoder, Context, answers
from foveate.transformers.attention import CACHE
from foveate.transformers.context import patch_batch
from foveate.transformers.model import check_config, load_model
from foveate.utils.device import dtype_name, versions
from foveate.utils.progress import Track, silent
from foveate.utils.timing import now, peak_memory

__all__ = [
    "MODELS",
    "TOLERANCE",
    "Question",
    "QuestionWorkload",
    "Work",
    "about",
    "bench_context",
    "check",
    "check_lengths",
    "encoder_of_ids",
    "find_encoder",
    "table_of",
]

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
SMALL = LLAMA_8B | {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}  # fmt: skip
MODELS = {"llama-8b": LLAMA_8B, "small": SMALL}
"""Model configs by name: Llama-3.1-8B, and a small model with equal head size and very uneven attention."""
CHECKED = 2000, 2000, 2100  # chunk lengths of the check: enough rows for every kernel
WARM_UPS = 2  # rounds that compile kernels and record graphs
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}


class QuestionWorkload(NamedTuple):
    """Sizes and numbers of the questions and answers of a benchmark.

    Attributes:
        chunk: Tokens of a chunk.
        prompt: Tokens of a question.
        answer: Tokens of an answer.
        concurrent: Numbers of concurrent questions.
        count: Least number of questions for each result.
        recompute: Fraction of the rows to recompute.
    """

    chunk: int = 2048
    prompt: int = 64
    answer: int = 64
    concurrent: tuple[int, ...] = (1, 4, 16)
    count: int = 32
    recompute: float = 0.15


class Question(NamedTuple):
    """Chunk indices of a context in order, and the token ids of the question after it."""

    order: tuple[int, ...]
    prompt: Tensor


class Work:
    """Random chunks in memory, and the ways to answer questions about them.

    Args:
        encoder: Encoder of the chunks.
        tokens: Length of a context, prefix included. The last chunk may be shorter than the others.
        asked: Sizes and numbers of questions and answers.
    """

    def __init__(self, encoder: ChunkEncoder, tokens: int, asked: QuestionWorkload) -> None:
        self.encoder, self.tokens, self.asked = encoder, tokens, asked
        documents = random_ids(encoder, tokens - len(encoder.prefix)).split(asked.chunk)
        self.chunks = encoder.encode([document.tolist() for document in documents])

    def draw(self, count: int, seed: int) -> list[Question]:
        """Random questions; the context of each has all chunks in another order."""
        draw, places = Random(seed), range(len(self.chunks))
        prompts = random_ids(self.encoder, count * self.asked.prompt, seed).split(self.asked.prompt)
        return [Question(tuple(draw.sample(places, len(places))), prompt) for prompt in prompts]

    def context(self, question: Question) -> Context:
        """The context of a question."""
        return self.encoder.compose([self.chunks[i] for i in question.order])

    def ids(self, question: Question) -> Tensor:
        """Token ids of a context and the question."""
        chunks = [self.chunks[i].ids for i in question.order]
        return torch.cat([self.encoder.prefix, *chunks, question.prompt])

    def check(self) -> float:
        """Relative error of the logits of a context with all rows recomputed.

        Raises:
            ValueError: If it is not the rounding of the full prefill.
        """
        (question,) = self.draw(1, 0)
        error = logits_error([self.context(question)], [question.prompt], FullPrefill())
        if not error <= TOLERANCE[self.encoder.dtype]:  # NaN is wrong too
            raise ValueError(
                f"recomputing all rows differs from the full prefill by {error:.1e} at {self.tokens} tokens"
            )
        return error

    def full_prefill(self, questions: Sequence[Question], options: dict[str, Any]) -> None:
        """Answer with a full prefill of each text."""
        self.encoder.generate([self.ids(question) for question in questions], **options)

    def prefix_cache(self, cache: Any, questions: Sequence[Question], options: dict[str, Any]) -> None:
        """Answer with copies of a prefix cache; all questions must have the same context."""
        count, texts = len(questions), torch.stack([self.ids(question) for question in questions])
        copies = [tuple(x.repeat(count, 1, 1, 1) for x in (layer.keys, layer.values)) for layer in cache.layers]
        self.encoder.model.generate(
            input_ids=texts,
            attention_mask=torch.ones_like(texts),
            **{CACHE: DynamicCache(copies)},
            do_sample=False,
            **options,
        )

    def patch(self, method: RecomputePolicy, questions: Sequence[Question], options: dict[str, Any]) -> None:
        """Answer with contexts that are composed for each question."""
        contexts = [self.context(question) for question in questions]
        prompts = [question.prompt.tolist() for question in questions]
        answers(contexts, method, prompts, batch_size=len(questions), **options)


Answer = Callable[[Sequence[Question], dict[str, Any]], None]


@torch.no_grad()
def bench_context(
    tokens: Sequence[int],
    model: str,
    asked: QuestionWorkload,
    device: torch.device,
    dtype: torch.dtype,
    track: Track = silent,
) -> Iterator[dict[str, Any]]:
    """Time concurrent questions about long contexts; yields all results so far, ready for JSON, after each one.

    Each question has the same chunks in another order, except for prefix caching, which needs one context for all
    questions: any other context would be a full prefill. Concurrent questions are answered in one batch, or in several
    if they do not fit into memory.

    Before timing, contexts of a small model with large random weights, and one of the timed model at each length, are
    compared with the full prefill.

    Args:
        tokens: Lengths of the contexts, prefix included.
        model: Name of `MODELS`, with random weights, or hub id or folder of a model.
        asked: Sizes and numbers of questions and answers.
        device: Device.
        dtype: Dtype.
        track: Shows progress.

    Raises:
        ValueError: If the model is unknown or too large for the device, a length is shorter than two chunks, or a
            check fails.
    """
    check_lengths(tokens, asked.chunk)
    encoder, checked = find_encoder(model, device, dtype), check(device, dtype)
    rows: list[dict[str, Any]] = []
    result = {
        "what": "concurrent questions: seconds to the first token, and tokens a second",
        **about(model, encoder),
        **asked._asdict(),
        "small_model": checked,
        "rows": rows,
        "versions": versions(),
    }
    for length in tokens:
        work = Work(encoder, length, asked)
        error = work.check()
        for concurrent in asked.concurrent:
            rounds = ceil(asked.count / concurrent)
            drawn = [work.draw(concurrent, seed) for seed in range(rounds)]
            alike = [[one._replace(order=drawn[0][0].order) for one in questions] for questions in drawn]
            for name, answer, some in _ways(work, drawn, alike):
                title = f"{length:,} tokens, {concurrent} at a time, {name}"
                row = {"tokens": length, "concurrent": concurrent, "variant": name, "all_recomputed_error": error}
                rows.append(row | _measured(work, answer, some, track(title, rounds + WARM_UPS)))
                alone = [one for one in rows if one["variant"] == name and one["tokens"] == length]
                if "tokens_per_s" in rows[-1] and alone[0]["concurrent"] == 1:
                    rows[-1]["throughput"] = rows[-1]["tokens_per_s"] / alone[0]["tokens_per_s"]
                yield result


def check_lengths(tokens: Sequence[int], chunk: int) -> None:
    """Raise a ValueError if a context of one of these lengths has less than two chunks."""
    if short := [length for length in tokens if length < 2 * chunk]:
        raise ValueError(
            f"a context of {short[0]} tokens has less than two chunks of {chunk}: use --chunk {short[0] // 2}"
        )


def about(model: str, encoder: ChunkEncoder) -> dict[str, Any]:
    """Description of the model, ready for JSON."""
    return {
        "model": model,
        "weights": "random" if model in MODELS else "its own",
        "parameters": sum(weight.numel() for weight in encoder.model.parameters()),
        "device": encoder.device.type,
        "dtype": dtype_name(encoder.dtype),
    }


def find_encoder(model: str, device: torch.device, dtype: torch.dtype) -> ChunkEncoder:
    """Encoder of a model of `MODELS` with random weights and token 0 as prefix, or of a hub id or folder.

    Raises:
        ValueError: If the model is unknown, not supported, or too large for the device.
    """
    if model not in MODELS:
        if "/" not in model and not model.startswith("."):
            raise ValueError(f"unknown model {model!r}: choose one of {', '.join(MODELS)}, or name a hub id or folder")
        return ChunkEncoder(*load_model(model, str(device), dtype_name(dtype), check_config))
    if model == "llama-8b" and device.type == "cpu":
        raise ValueError("llama-8b has 8 billion parameters, too many for a CPU: use --model small, or a GPU")
    torch.manual_seed(0)
    return encoder_of_ids(random_model(lambda: LlamaForCausalLM(LlamaConfig(**MODELS[model])), device, dtype))


def encoder_of_ids(model: Any, process_group: Any = None) -> ChunkEncoder:
    """Encoder without a tokenizer, for token ids. Token 0 is the prefix."""
    tokenizer: Any = SimpleNamespace(
        bos_token_id=0, get_vocab=dict, special_tokens_map={}, decode=lambda ids, **options: " ".join(map(str, ids))
    )
    return ChunkEncoder(model, tokenizer, process_group=process_group)


def random_ids(encoder: ChunkEncoder, count: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, encoder.model.config.vocab_size, (count,), generator=draw).to(encoder.device)


def check(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Errors of the logits of a small model for two contexts, with all rows recomputed and with none.

    Raises:
        ValueError: If recomputing all rows differs from the full prefill, or recomputing none does not.
    """
    encoder = find_encoder("small", device, dtype)
    documents = random_ids(encoder, sum(CHECKED)).split(list(CHECKED))
    chunks = encoder.encode([document.tolist() for document in documents])
    contexts = [encoder.compose(chunks), encoder.compose(chunks[:0:-1])]
    prompts = [random_ids(encoder, count, seed=1) for count in (20, 33)]
    methods = {"all_recomputed_error": FullPrefill(), "stale_error": NoRecompute()}
    errors = {name: logits_error(contexts, prompts, method) for name, method in methods.items()}
    if not errors["all_recomputed_error"] <= TOLERANCE[dtype] < errors["stale_error"]:  # NaN is wrong too
        raise ValueError(f"recomputing all rows is not the full prefill of a small model ({errors}): not timing it")
    return errors


@torch.no_grad()
def logits_error(contexts: Sequence[Context], prompts: Sequence[Tensor], method: RecomputePolicy) -> float:
    """Relative error of the next tokens' logits against full prefills."""
    patched = patch_batch(contexts, prompts, [method] * len(contexts))
    ours = torch.cat(patched.logits(last=1)).float()
    patched.close()
    texts = [torch.cat([context.ids, prompt])[None] for context, prompt in zip(contexts, prompts, strict=True)]
    model = contexts[0].lm.model
    full = torch.cat([model(input_ids=ids, logits_to_keep=1, use_cache=False).logits[0] for ids in texts]).float()
    return float((ours - full).norm() / full.norm())


Rounds = list[list[Question]]


def _ways(work: Work, drawn: Rounds, alike: Rounds) -> Iterator[tuple[str, Answer, Rounds]]:
    """Name, function and questions of each way to answer, in turn."""
    yield "full prefill", work.full_prefill, drawn
    cache: Any = DynamicCache()
    work.encoder.model.model(input_ids=work.context(alike[0][0]).ids[None], **{CACHE: cache})
    yield "prefix cache, one context", partial(work.prefix_cache, cache), alike
    del cache
    yield "no recompute", partial(work.patch, NoRecompute()), drawn
    ours = InfoFlowKV(recompute=work.asked.recompute)
    yield f"InfoFlow {ours.recompute:.0%}", partial(work.patch, ours), drawn


def _measured(work: Work, answer: Answer, drawn: Rounds, advance: Callable[[], None]) -> dict[str, Any]:
    """Result row of one way to answer, with batches that fit into memory."""
    device, batch = work.encoder.device, len(drawn[0])
    work.encoder.free()  # the memory of other ways
    peaks: list[int | None] = []
    rounds: list[list[float]] = []
    for questions in [drawn[0]] * WARM_UPS + drawn:
        while batch:
            times: list[float] = []
            try:
                run = partial(_answer, work, answer, questions, batch, times)
                run() if peaks else peaks.append(peak_memory(run, device))
                break
            except torch.OutOfMemoryError:
                batch //= 2
            work.encoder.free()
        if not batch:
            return {"failed": "out of memory"}
        rounds.append(times)
        advance()
    firsts = [time for *first, _ in rounds[WARM_UPS:] for time in first]
    median, slow = torch.tensor(firsts).quantile(torch.tensor([0.5, 0.99])).tolist()
    return {
        "batch": batch,
        "questions": len(firsts),
        "first_token_p50_s": median,
        "first_token_p99_s": slow,
        "tokens_per_s": len(firsts) * work.asked.answer / sum(last for *_, last in rounds[WARM_UPS:]),
        "peak_bytes": peaks[0],
    }


def _answer(work: Work, answer: Answer, questions: list[Question], batch: int, times: list[float]) -> None:
    """Answer concurrent questions; append the time of each first token, and then of the end, to `times`."""
    device, length, begin = work.encoder.device, work.asked.answer, now(work.encoder.device)
    for start in range(0, len(questions), batch):
        some, stamps = questions[start : start + batch], []

        def clock(ids: Tensor, scores: Tensor, stamps: list[float] = stamps) -> Tensor:
            if not stamps:
                stamps.append(now(device))
            return scores

        answer(some, {"max_new_tokens": length, "min_new_tokens": length, "logits_processor": [clock]})
        times += [stamps[0] - begin] * len(some)
    times.append(now(device) - begin)


COLUMNS: list[TableColumn] = [
    ("", "variant", str),
    ("batch", "batch", str),
    ("first token p50, ms", "first_token_p50_s", milliseconds),
    ("p99, ms", "first_token_p99_s", milliseconds),
    ("tokens/s", "tokens_per_s", "{:.4g}".format),
    ("over one by one", "throughput", "{:.2f}x".format),
    ("GB", "peak_bytes", lambda count: f"{count / 1e9:.2f}"),
]


def table_of(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal, grouped by length and number of questions."""
    return results_table(
        result["rows"], COLUMNS, lambda row: f"{row['tokens']:,} tokens, {row['concurrent']} at a time"
    )
