"""Laws of chunks that hold images, against the models' own forward pass over all images and texts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_lm
import torch
from tiny_vision import FAMILIES, encoder, model, picture
from torch import Tensor

from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import CacheBlend, FullPrefill
from foveate.transformers import ChunkCache, ChunkEncoder
from foveate.transformers.context import answers
from foveate.transformers.images import PreparedImage, image_token

DOCUMENTS = [
    ["w1 w2", picture(1), "w3 w4 w5"],
    "w6 w7 w8",
    [picture(2, 24, 16)],
    ["w9", picture(3), "w2", picture(4, 32, 16)],
]
PROMPT = "w20 w21 w22"


def composed(ours, documents=DOCUMENTS):
    return ours.compose(ours.encode(documents))


def full_logits(ours, documents, prompt=PROMPT):
    """Logits of the prompt by the model itself, from the texts and the images of all documents together."""
    parts = [part for document in documents for part in ours.read(document).parts]
    ids = [part.tokens.ids if isinstance(part, PreparedImage) else part.ids for part in parts]
    ids = torch.cat([ours.prefix, *ids, ours.tokens(prompt)])[None]
    images = [part.inputs for part in parts if isinstance(part, PreparedImage)]
    inputs: dict[str, Tensor] = {}
    for name in images[0].keys() - {"input_ids"} if images else ():
        if name in ("mm_token_type_ids", "token_type_ids"):
            inputs[name] = (ids == image_token(ours.model.config)).long()
        else:  # SmolVLM and Idefics3 have the images of a text in their second dimension
            tensors = [image[name].double() if image[name].is_floating_point() else image[name] for image in images]
            inputs[name] = torch.cat(tensors, 1 if "pixel_attention_mask" in images[0] else 0)
    with torch.no_grad():
        return ours.model(input_ids=ids, **inputs).logits[0, -len(ours.tokens(prompt)) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_all_rows_is_the_full_prefill_with_images(family):
    ours = encoder(family)
    context, full = composed(ours), full_logits(ours, DOCUMENTS)
    methods = FullPrefill(), InfoFlowKV(recompute=1.0), InfoFlowKV(recompute=1.0, geometry="tl-tp"), CacheBlend(
        recompute=1.0
    )  # fmt: skip
    for method in methods:
        with context.patch(method, PROMPT) as patched:
            torch.testing.assert_close(patched.logits(), full, rtol=0, atol=1e-12)
            assert patched.fidelity() < 1e-12
    with context.patch(InfoFlowKV(recompute=0.0), PROMPT) as patched:
        assert (patched.logits() - full).abs().max() > 0.01
        assert patched.fidelity() > 1e-4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_moved_chunk_has_the_keys_of_its_place(family):
    """The second of two equal chunks: rows of layer 0 depend on their tokens and positions alone."""
    ours = encoder(family)
    context = composed(ours, [DOCUMENTS[0], DOCUMENTS[3], DOCUMENTS[0]])
    before = context.keys.clone()
    with context.patch(FullPrefill(), PROMPT) as patched:
        torch.testing.assert_close(patched.cache().layers[0].keys, before[0], rtol=1e-5, atol=1e-5)
    if ours.axes == 3:
        assert context.end < len(context)  # images have fewer positions than tokens


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava_onevision"])
def test_generated_text_is_that_of_the_full_prefill(family):
    ours = encoder(family)
    context, ids = composed(ours), list[int]()
    for _ in range(4):
        full = full_logits(ours, DOCUMENTS, [*ours.tokens(PROMPT).tolist(), *ids])
        ids.append(int(full[-1].argmax()))
    with context.patch(InfoFlowKV(recompute=1.0), PROMPT) as patched:
        assert patched.generate(max_new_tokens=4) == ours.decoder.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm"])
def test_a_batch_equals_each_context_alone_also_in_threads(family):
    ours = encoder(family)
    contexts = [composed(ours), composed(ours, DOCUMENTS[1:2]), composed(ours, DOCUMENTS[2:])]
    prompts = [PROMPT, "w20", "w21 w22"]
    for method in (InfoFlowKV(recompute=0.4), InfoFlowKV(recompute=0.4, reorder=True)):
        alone = [answers([c], method, [p], max_new_tokens=4)[0] for c, p in zip(contexts, prompts, strict=True)]
        assert answers(contexts, method, prompts, max_new_tokens=4) == alone
        with ThreadPoolExecutor(3) as pool:
            found = [
                pool.submit(context.answers, method, [prompt], max_new_tokens=4)
                for context, prompt in zip(contexts, prompts, strict=True)
            ]
            assert [each.result()[0] for each in found] == alone


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_a_saved_chunk_is_the_same_and_belongs_to_its_image(family, tmp_path):
    ours = encoder(family)
    (chunk,) = ours.encode(DOCUMENTS[:1])
    for kept in (chunk, chunk.quantized()):
        kept.save(tmp_path / "chunk.safetensors")
        loaded = ChunkCache.load(tmp_path / "chunk.safetensors", ours, DOCUMENTS[0])
        assert (loaded.images, loaded.stored.keys()) == (chunk.images, kept.stored.keys())
        assert all(torch.equal(loaded.stored[name], tensor) for name, tensor in kept.stored.items())
        with ours.compose([loaded]).patch(FullPrefill(), PROMPT) as patched:
            torch.testing.assert_close(patched.logits(), full_logits(ours, DOCUMENTS[:1]), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="was made from another image: encode the document again"):
        ChunkCache.load(tmp_path / "chunk.safetensors", ours, ["w1 w2", picture(9), "w3 w4 w5"])
    with pytest.raises(ValueError, match="was made from another text"):
        ChunkCache.load(tmp_path / "chunk.safetensors", ours, ["w1 w3", picture(1), "w3 w4 w5"])


def test_the_model_is_never_changed_and_reads_the_same_image_at_any_time():
    ours = encoder("qwen3_vl")
    before = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    first, second = (ours.encode(DOCUMENTS[:1])[0] for _ in range(2))
    assert torch.equal(first.keys, second.keys)
    assert first.images == second.images
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.model.state_dict().items())
    assert ours.model.model.rope_deltas is None


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_model_that_sees_reads_texts_alone_with_its_tokenizer(family):
    ours = ChunkEncoder(model(family), tiny_lm.tokenizer(), "<s> w60")
    context = composed(ours, tiny_lm.DOCUMENTS)
    with context.patch(InfoFlowKV(recompute=1.0), PROMPT) as patched:
        torch.testing.assert_close(patched.logits(), full_logits(ours, tiny_lm.DOCUMENTS), rtol=0, atol=1e-12)
        assert patched.fidelity() < 1e-12
    with pytest.raises(ValueError, match="without what prepares images: pass the model's processor"):
        ours.encode([[picture()]])


def test_bad_documents_with_images_are_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM reads no images: leave them out"):
        tiny_lm.encoder().encode([["w1", picture()]])
    ours = encoder("qwen3_vl")
    with pytest.raises(ValueError, match=r"a document holds texts and images \(PIL\), not 5"):
        ours.encode([["w1", 5]])
    with pytest.raises(ValueError, match="hold the placeholder of an image"):
        ours.encode([[3, image_token(ours.model.config)]])
    with pytest.raises(ValueError, match=r"document 0 with its prefix: \d+ tokens, but the model takes at most 512"):
        ours.encode([[picture(), "w1 " * 520]])
