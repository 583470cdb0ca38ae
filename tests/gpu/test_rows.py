"""Laws of row attention on a GPU: equal to masked float64 attention; patched models equal full prefill."""

from copy import deepcopy
from threading import Thread

import pytest
import torch
from oracle import dense_attention
from tiny_lm import DOCUMENTS, PROMPTS, language_model, tokenizer

from foveate import InfoFlowKV
from foveate.kernels.rows.row_attention import BACKENDS
from foveate.methods.baselines.kv_baselines import CacheBlend
from foveate.ops import dispatch
from foveate.ops.row_attention import portable, row_attention_lse
from foveate.transformers import ChunkEncoder, answers

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def some(tokens, chosen):
    return torch.randperm(tokens, device=CUDA)[:chosen].sort().values


def qkv(tokens, chosen, heads, groups, dim, dtype, batch=1):
    q = torch.randn(batch, chosen, heads, dim, device=CUDA, dtype=dtype).transpose(1, 2)
    return q, *(torch.randn(batch, groups, tokens, dim, device=CUDA, dtype=dtype) for _ in range(2))


def error(got, q, k, v, rows, scale):
    """Relative error against float64, computed head by head."""
    share, mask = q.shape[1] // k.shape[1], rows[:, None] >= torch.arange(k.shape[2], device=CUDA)
    wrong, right = 0.0, 0.0
    for head in range(q.shape[1]):
        group = slice(head // share, head // share + 1)
        want, _ = dense_attention(q[:, head : head + 1], k[:, group], v[:, group], mask, scale)
        wrong += (got[:, head : head + 1] - want).square().sum().item()
        right += want.square().sum().item()
    return (wrong / right) ** 0.5


def run(name, q, k, v, rows, scale, *limits):
    supports, kernel = BACKENDS[name]
    if not supports(CUDA, q.dtype, q.shape[3]):
        pytest.skip(f"{name} does not support head_dim {q.shape[3]} on this GPU")
    return kernel(q, k, v, rows, scale, *limits)[0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dim", [16, 40, 64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("tokens", "chosen", "heads", "groups"),
    [(1, 1, 2, 1), (63, 5, 4, 2), (1000, 1000, 3, 3), (1337, 64, 8, 2), (2049, 301, 32, 8), (5000, 1111, 28, 4)],
)
def test_rows_equal_the_dense_mask(name, tokens, chosen, heads, groups, dim, dtype, tolerance):
    rows = some(tokens, chosen)
    q, k, v = qkv(tokens, chosen, heads, groups, dim, dtype, batch=2 if tokens < 2000 else 1)
    got = run(name, q, k, v, rows, dim**-0.5)
    assert got.shape == q.shape
    assert error(got, q, k, v, rows, dim**-0.5) < tolerance


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [[0], [4096], [0, 4096], list(range(4033, 4097)), list(range(3000, 4097))])
def test_first_rows_last_rows_and_a_prompt_equal_the_dense_mask(name, rows):
    rows = torch.tensor(rows, device=CUDA)
    q, k, v = qkv(4097, len(rows), 32, 8, 128, torch.bfloat16)
    assert error(run(name, q, k, v, rows, 0.1), q, k, v, rows, 0.1) < 1e-2
    assert error(run(name, q, k, v, rows, -0.1), q, k, v, rows, -0.1) < 1e-2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("tokens", "chosen"), [(700, 1), (1337, 64), (5000, 900)])
def test_samples_may_differ_in_rows_windows_and_sinks(name, tokens, chosen):
    rows = torch.stack([some(tokens, chosen) for _ in range(3)])
    rows[1, chosen // 2 :] = tokens - 1  # tokens that pad a shorter prompt
    q, k, v = qkv(tokens, chosen, 32, 8, 64, torch.bfloat16, batch=3)
    sinks = torch.randn(32, device=CUDA)
    for window, logits in ((None, None), (None, sinks), (1, None), (128, sinks), (2 * tokens, None)):
        got = run(name, q, k, v, rows, 0.125, window, logits)
        want, _ = portable(*(x.float() for x in (q, k, v)), rows, 0.125, window, logits)
        assert (got - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("name", BACKENDS)
def test_layouts_of_models_and_caches_give_the_same(name):
    tokens, chosen = 3000, 900
    rows = some(tokens, chosen)
    q, k, v = qkv(tokens, chosen, 16, 4, 128, torch.bfloat16)
    roomy = torch.full((1, 4, 4000, 128), torch.nan, device=CUDA, dtype=torch.bfloat16)
    roomy[:, :, :tokens] = k
    token_major = v.transpose(1, 2).contiguous().transpose(1, 2)
    want = run(name, q, k, v, rows, 0.1)
    for layout in (q, q.contiguous()):
        assert torch.equal(run(name, layout, k, token_major, rows, 0.1), want)
        got = run(name, layout, roomy[:, :, :tokens], token_major, rows, 0.1)  # not addressable by the Hopper kernel
        assert error(got, q, k, v, rows, 0.1) < 1e-2


@pytest.mark.parametrize("name", BACKENDS)
def test_15_percent_of_32768_rows_equal_the_portable_path(name):
    rows = some(32768, 4915)
    q, k, v = qkv(32768, 4915, 32, 8, 128, torch.bfloat16)
    got = run(name, q, k, v, rows, 128**-0.5)
    for head in (0, 31):
        one = slice(head, head + 1), slice(head // 4, head // 4 + 1)
        want, _ = portable(q[:, one[0]].float(), k[:, one[1]].float(), v[:, one[1]].float(), rows, 128**-0.5)
        assert (got[:, one[0]] - want).norm() < 1e-2 * want.norm()
    assert torch.equal(got, run(name, q, k, v, rows, 128**-0.5))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("tokens", "chosen"), [(9000, 64), (2049, 301), (4097, 1500)])
def test_outputs_and_lse_over_parts_of_the_keys_merge_to_those_over_all(dim, tokens, chosen):
    rows = some(tokens, chosen)
    q, k, v = qkv(tokens, chosen, 32, 8, dim, torch.bfloat16)
    parts = [slice(0, tokens // 3), slice(tokens // 3, None)]
    seen = [(rows - part.start).clamp(max=k[:, :, part].shape[2] - 1) for part in parts]
    outs, lses = zip(*(
        row_attention_lse(q, k[:, :, part], v[:, :, part], at.clamp(min=0), dim**-0.5)
        for part, at in zip(parts, seen, strict=True)
    ), strict=True)  # fmt: skip
    lse = torch.stack([lse.masked_fill(at < 0, -torch.inf) for lse, at in zip(lses, seen, strict=True)])
    merged = (torch.stack(outs) * lse.softmax(0)[..., None]).sum(0)
    assert error(merged, q, k, v, rows, dim**-0.5) < 1e-2


@pytest.mark.parametrize("with_lse", [(False, True), (True, False)])
def test_the_op_passes_opcheck(with_lse):
    q, k, v = qkv(500, 130, 4, 2, 64, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.foveate.row_attention.default, (q, k, v, some(500, 130), 0.125, None, None, *with_lse)
    )


@pytest.mark.parametrize("backend", ["portable", *BACKENDS])
def test_a_patched_model_on_a_gpu_equals_full_prefill_on_a_cpu(monkeypatch, backend):
    """In bfloat16, with a head_dim that the kernels support."""
    model = language_model("llama", dtype=torch.bfloat16, hidden_size=256, initializer_range=0.1)
    ours = ChunkEncoder(deepcopy(model).cuda(), tokenizer(), "<s> w60")
    ids = torch.cat([ours.prefix, *(ours.tokens(document) for document in DOCUMENTS), ours.tokens(PROMPTS[1])])
    with torch.no_grad():
        want = model.double()(input_ids=ids[None].cpu()).logits[0, -len(ours.tokens(PROMPTS[1])) :]
    here = [entry for entry in dispatch._BACKENDS["row_attention"] if entry.name == "portable"]
    if backend in BACKENDS:
        here.append(dispatch.Backend(backend, *BACKENDS[backend]))
    monkeypatch.setitem(dispatch._BACKENDS, "row_attention", here)
    context = ours.compose(ours.encode(DOCUMENTS))
    texts = set()
    for _ in range(3):  # eager, captured, and replayed
        with context.patch(InfoFlowKV(recompute=1.0), PROMPTS[1]) as patched:
            got = patched.logits().cpu()
            texts.add(patched.generate(max_new_tokens=4))
        assert (got - want).norm() < 0.06 * want.norm()
    assert len(texts) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_answers_of_a_padded_batch_are_those_of_single_questions_in_graphs_too(family):
    ours = ChunkEncoder(language_model(family, dtype=torch.float32).cuda(), tokenizer(), "<s> w60")
    chunks = ours.encode(DOCUMENTS)
    contexts = [ours.compose(chunks), ours.compose(chunks[1:3]), ours.compose(chunks[::-1])]
    alone = []
    for context, prompt in zip(contexts, PROMPTS, strict=True):
        with context.patch(InfoFlowKV(recompute=0.4), prompt) as patched:
            alone.append(patched.generate(max_new_tokens=6))
    for _ in range(3):  # eager, captured, and replayed
        assert answers(contexts, InfoFlowKV(recompute=0.4), PROMPTS, max_new_tokens=6) == alone


def test_graphs_and_threads_give_the_answers_of_the_first_eager_pass_bit_for_bit():
    ours = ChunkEncoder(language_model("llama", dtype=torch.float32, hidden_size=256).cuda(), tokenizer(), "<s> w60")
    context = ours.compose(ours.encode(DOCUMENTS))
    questions = [(InfoFlowKV(), PROMPTS[0]), (CacheBlend(), PROMPTS[1]), (InfoFlowKV(recompute=0.4), PROMPTS[2])]

    def answer(method, prompt):
        with context.patch(method, prompt) as patched:
            return patched.logits(), patched.generate(max_new_tokens=3)

    first = [answer(*question) for question in questions]
    wrong = []

    def ask(thread):
        for i in range(30):
            logits, text = answer(*questions[(i + thread) % 3])
            if not torch.equal(logits, first[(i + thread) % 3][0]) or text != first[(i + thread) % 3][1]:
                wrong.append((thread, i))

    for threads in (1, 6):
        workers = [Thread(target=ask, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong
