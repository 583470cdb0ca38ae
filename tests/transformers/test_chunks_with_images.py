"""Laws of chunks that hold images, against the models' own forward pass over all images and texts."""

from base64 import b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import tiny_lm
import torch
from tiny_vision import FAMILIES, encoder, model, picture
from torch import Tensor

from foveate.apps.serve.answerer import Answerer
from foveate.apps.serve.completion import Completion
from foveate.apps.serve.question_queue import PendingQuestion
from foveate.methods import InfoFlowKV
from foveate.methods.baselines.kv_baselines import CacheBlend, FullPrefill
from foveate.transformers import ChunkCache, ChunkEncoder
from foveate.transformers.context import answers
from foveate.transformers.images import PreparedImage, image_token
from foveate.transformers.index import ChunkIndex, index_documents
from foveate.transformers.rag import ask
from foveate.transformers.readers import read_documents

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


def test_a_folder_with_pictures_is_indexed_and_asked(tmp_path):
    """Two pictures of one size have equal token ids, but not the same chunk."""
    folder, ours = tmp_path / "documents", encoder("qwen3_vl")
    folder.mkdir()
    for name, seed in (("w1.png", 1), ("w2.png", 2)):
        picture(seed).save(folder / name)
    (folder / "w3.txt").write_text("w3 w4 w5")
    (folder / "bad.png").write_bytes((folder / "w1.png").read_bytes()[:60])
    ignored, skipped = Counter[str](), list[str]()
    assert read_documents(folder, skipped, ignored).keys() == {"w3.txt"}
    assert ignored == {".png": 3}
    documents = read_documents(folder, skipped, pictures=True)
    assert documents.keys() == {"w1.png", "w2.png", "w3.txt"}
    assert "bad.png cannot be read" in skipped[0]
    index = index_documents(tmp_path / "index", ours, documents)
    assert index.build().encoded == 3
    assert index_documents(tmp_path / "index", ours, documents).build().found == 3
    chunks = index.load([0, 1, 2])
    assert torch.equal(chunks[0].ids[-8:], chunks[1].ids[-8:])
    assert not torch.equal(chunks[0].values, chunks[1].values)
    contents = [passage.content for passage in index.passages]
    with ours.compose(chunks).patch(InfoFlowKV(recompute=1.0), PROMPT) as patched:
        torch.testing.assert_close(patched.logits(), full_logits(ours, contents), rtol=0, atol=1e-12)
    for file in (tmp_path / "index").glob("*.safetensors"):
        file.unlink()
    reply = ask(ChunkIndex(tmp_path / "index", ours), "w1", {"full": FullPrefill(), "ours": InfoFlowKV(recompute=1.0)},
                prompt="{question} w20", max_new_tokens=3)  # fmt: skip
    assert [index.passages[number].name for number in reply.passages] == ["w1.png"]
    assert reply.answers[0].text == reply.answers[1].text


def test_a_request_with_an_image_is_answered_from_it(tmp_path):
    ours = encoder("gemma3")
    index = index_documents(tmp_path, ours, {"a": "w1 w2 w3"})
    index.build()
    answerer = Answerer(ours, {"a": index}, InfoFlowKV(recompute=1.0), prompt="{question}", chat=False,
                        passage_tokens=64, max_new_tokens=4, batch=2)  # fmt: skip

    def asked(*seeds, **more):
        parts = [{"type": "text", "text": "w1 w20"}]
        parts += [{"type": "image_url", "image_url": {"url": data_url(seed)}} for seed in seeds]
        return PendingQuestion(Completion(messages=[{"role": "user", "content": parts}], **more))

    questions = [asked(1), asked(2, 1, documents=["w4 w5"])]
    for question in questions:
        answerer.prepare(question)
    waiting = [*questions]
    answerer.answer(lambda fits: waiting.pop(0) if waiting and fits(waiting[0]) else None)
    for question, documents in zip(questions, (["w1 w2 w3\n\n", [picture(1), "\n\n"]],
                                               ["w4 w5\n\n", [picture(2), "\n\n"], [picture(1), "\n\n"]]),
                                   strict=True):  # fmt: skip
        with composed(ours, documents).patch(InfoFlowKV(recompute=1.0), "w1 w20") as patched:
            assert question.outcome.result().text == patched.generate(max_new_tokens=4).lstrip()
    assert questions[0].outcome.result().passages == ["a", "image 1"]
    damaged = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "w1"},
    ]
    with pytest.raises(ValueError, match="image 1: an image cannot be read"):
        answerer.prepare(PendingQuestion(Completion(messages=[{"role": "user", "content": damaged}])))
    with pytest.raises(ValueError, match="only messages of the user hold images"):
        Completion(messages=[{"role": "system", "content": damaged}])


def data_url(seed):
    content = BytesIO()
    picture(seed).save(content, "png")
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"
