"""Laws of cached chunks: keys move to any position, files are read back bit for bit, wrong input is refused."""

import inspect
import pickle

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save
from tiny_lm import DOCUMENTS, PAIRS, encoder, language_model, tokenizer
from transformers import DynamicCache, LlamaForCausalLM

from foveate import InfoFlowKV
from foveate.ops.rotary import rotate
from foveate.transformers import ChunkCache, ChunkEncoder
from foveate.transformers import encoder as encoder_module
from foveate.transformers.attention import CACHE
from foveate.transformers.fingerprint import checksum


@pytest.mark.parametrize(("family", "rope"), PAIRS)
def test_rotated_keys_equal_keys_computed_at_the_position(family, rope):
    """Equal to the precision of the models' angles, which are float32 in every dtype."""
    ours = encoder(family, rope)
    chunks = ours.encode([DOCUMENTS[1], DOCUMENTS[2]])
    positions = torch.cat([torch.arange(7), torch.arange(30, 39)])  # prefix and first chunk; second chunk, far away
    context = ours.compose(chunks)
    keys, values = context.keys_at(positions), context.values
    for chunk, place, rows in ((chunks[0], 0, slice(0, 7)), (chunks[1], 28, slice(5, 16))):
        cache = DynamicCache()
        ids = torch.cat([ours.prefix, chunk.ids])
        ours.model.model(input_ids=ids[None], position_ids=torch.arange(place, place + len(ids))[None],
                         **{CACHE: cache})  # fmt: skip
        skip = 0 if place == 0 else len(ours.prefix)
        rows = slice(rows.start + skip, rows.stop)
        for layer, key, value in zip(cache.layers, keys, values, strict=True):
            torch.testing.assert_close(key[0, :, rows], layer.keys[0, :, skip:].detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(value[0, :, rows], layer.values[0, :, skip:].detach(), rtol=1e-5, atol=1e-5)


def test_documents_of_equal_length_are_encoded_together_as_each_alone(monkeypatch):
    monkeypatch.setattr(encoder_module, "ENCODE_ROWS", 16)
    ours, texts = encoder(), ["w1 w2 w3 w4 w5", "w6 w7 w8 w9 w1", "w2 w2 w3 w3 w4", "w5 w6", "w7 w8 w9 w2 w1"]
    passes = []
    ours.row_model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    chunks = ours.encode(texts)
    assert len(passes) == 3
    for chunk, text in zip(chunks, texts, strict=True):
        (alone,) = ours.encode([text])
        assert torch.equal(chunk.ids, alone.ids)
        torch.testing.assert_close(chunk.keys, alone.keys, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(chunk.values, alone.values, rtol=1e-12, atol=1e-12)


def test_longrope_ends_where_its_angles_change():
    with pytest.raises(ValueError, match=r"101 tokens, but the model takes at most 96; .* all keys by other angles"):
        encoder("phi3", "longrope").encode([[5] * 99])


def test_keys_are_rounded_once():
    ours = encoder(dtype=torch.bfloat16)
    (chunk,) = ours.encode([DOCUMENTS[0]])
    positions = torch.arange(80, 80 + chunk.keys.shape[2])
    tables = ours.model.model.rotary_emb(torch.empty(0, dtype=torch.float64), positions[None])
    exact = rotate(chunk.keys.double(), *(table[0] for table in tables))
    for layer, keys in enumerate(ours.compose([chunk]).keys_at(positions)):
        assert keys.dtype == torch.bfloat16
        torch.testing.assert_close(keys[0].double(), exact[layer], rtol=2**-8, atol=1e-5)


def test_a_chunk_prints_its_size_and_no_tensors():
    (chunk,) = encoder().encode(DOCUMENTS[:1])
    assert repr(chunk) == "ChunkCache(7 tokens, 0.0 MiB)"


def test_encoding_and_composing_leave_the_model_and_the_chunks_unchanged():
    ours = encoder("qwen3")
    before = {name: weight.clone() for name, weight in ours.model.state_dict().items()}
    (chunk,) = ours.encode([DOCUMENTS[0]])
    keys, values = chunk.keys.clone(), chunk.values.clone()
    with ours.compose([chunk]).patch(InfoFlowKV(exclude_first=False), "w20"):
        pass
    assert torch.equal(chunk.keys, keys)
    assert torch.equal(chunk.values, values)
    assert all(torch.equal(weight, before[name]) for name, weight in ours.model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in ours.model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_file_is_read_back_bit_for_bit(dtype, tmp_path):
    ours = encoder("qwen2", dtype=dtype)
    (chunk,) = ours.encode([DOCUMENTS[0]])
    assert chunk.keys.dtype == chunk.values.dtype == dtype
    chunk.save(tmp_path / "rules.safetensors")
    loaded = ChunkCache.load(tmp_path / "rules.safetensors", encoder("qwen2", dtype=dtype), text=DOCUMENTS[0])
    for name in ("ids", "keys", "values"):
        assert torch.equal(getattr(loaded, name), getattr(chunk, name))
        assert getattr(loaded, name).device == getattr(chunk, name).device
    assert loaded.fingerprint == chunk.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["rules.safetensors"]
    (tmp_path / "rules.safetensors").unlink()  # loaded tensors do not depend on the file
    torch.testing.assert_close(ours.compose([loaded]).keys, ours.compose([chunk]).keys, rtol=0, atol=0)


OTHERS = {
    "weights": lambda: encoder(seed=1),
    "config": lambda: encoder(rope_parameters={"rope_type": "default", "rope_theta": 200.0}),
    "dtype": lambda: encoder(dtype=torch.float32),
    "prefix": lambda: encoder(prefix="w60"),
    "tokenizer": lambda: ChunkEncoder(language_model(), tokenizer(bos="w5"), "<s> w60"),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_chunk_with_another_fingerprint_is_refused_by_name(field, tmp_path):
    (chunk,) = encoder().encode([DOCUMENTS[0]])
    chunk.save(tmp_path / "chunk.safetensors")
    other = OTHERS[field]()
    for attempt in (lambda: ChunkCache.load(tmp_path / "chunk.safetensors", other), lambda: other.compose([chunk])):
        with pytest.raises(ValueError, match=rf"made with another .*{field}.*encode the document again"):
            attempt()


def adapted(model, alpha=4):
    if Version(transformers.__version__) >= Version("5.24") and Version(peft.__version__) < Version("0.22"):
        pytest.skip("add_adapter of transformers 5.24 needs peft 0.22")
    model.add_adapter(LoraConfig(r=2, lora_alpha=alpha, target_modules=["k_proj"], init_lora_weights="gaussian"))


def change_one_weight(model):
    model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-9


def in_one_layer(change, dtype):
    """Two models of a dtype: one as it is, and one with a changed weight."""

    def cast(model):
        model.to(dtype)

    def changed(model):
        cast(model)
        change(model.model.layers[1].self_attn.v_proj.weight)

    return "weights", cast, changed


# each: an entry of the fingerprint, and two changes of a model for which it must differ
CHANGES = {
    "one weight": ("weights", lambda model: None, change_one_weight),
    "negated, float32": in_one_layer(lambda w: w[:, 1::2].neg_(), torch.float32),
    "negated, bfloat16": in_one_layer(lambda w: w[:, 3::4].neg_(), torch.bfloat16),
    "negated, float64": in_one_layer(lambda w: w.neg_(), torch.float64),
    "doubled": in_one_layer(lambda w: w.mul_(2), torch.float64),
    "rows exchanged": in_one_layer(lambda w: w.copy_(w.flip(0)), torch.float64),
    "rounded frequencies": ("weights", lambda model: None, lambda model: model.model.rotary_emb.bfloat16().double()),
    "adapter switched off": ("adapters", adapted, lambda model: (adapted(model), model.disable_adapters())),
    "adapter scaled": ("adapters", adapted, lambda model: adapted(model, alpha=16)),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_of_the_model_changes_its_fingerprint(change):
    field, *changes = CHANGES[change]
    models = [language_model(), language_model()]
    for model, edit in zip(models, changes, strict=True):
        edit(model)
    first, second = (ChunkEncoder(model.eval(), tokenizer()).fingerprint[field] for model in models)
    assert first != second


def test_a_checksum_depends_on_the_bytes_only():
    whole = torch.randn(3, 4, dtype=torch.bfloat16)
    assert checksum(whole[:, 1:]) == checksum(whole[:, 1:].clone()) != checksum(whole[:, :3])
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(-1.0))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0))


def test_settings_without_effect_keep_the_fingerprint(tmp_path):
    first = encoder(attn_implementation="sdpa")
    first.model.save_pretrained(tmp_path)
    second = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager").eval()
    second.model.rotary_emb.double()  # as `language_model` casts it
    second.config.update({"pad_token_id": 3, "eos_token_id": [1, 2], "attention_dropout": 0.1, "id2label": {0: "no"}})
    assert ChunkEncoder(second, first.tokenizer, "<s> w60").fingerprint == first.fingerprint


def test_padding_keeps_the_fingerprint():
    ours = encoder()
    ours.tokenizer.pad_token = "</s>"
    before = ChunkEncoder(ours.model, ours.tokenizer).fingerprint
    ours.tokenizer(DOCUMENTS, padding=True, truncation=True, max_length=4)
    assert ChunkEncoder(ours.model, ours.tokenizer).fingerprint == before


def test_another_text_is_refused(tmp_path):
    ours = encoder()
    ours.encode([DOCUMENTS[0]])[0].save(tmp_path / "chunk.safetensors")
    with pytest.raises(ValueError, match="made from another text"):
        ChunkCache.load(tmp_path / "chunk.safetensors", ours, text=DOCUMENTS[1])


def flipped(tensor, place):
    """The tensor with one bit flipped."""
    bits = tensor.clone().view(torch.uint8)
    bits.flatten()[place] ^= 1
    return bits.view(tensor.dtype)


# each makes the content of a file from the content, tensors and header of a chunk's file
DAMAGES = {
    "truncated": lambda whole, tensors, header: whole[:-100],
    "header only": lambda whole, tensors, header: whole[:50],
    "empty": lambda whole, tensors, header: b"",
    "pickle": lambda whole, tensors, header: pickle.dumps(tensors),
    "no header": lambda whole, tensors, header: save(tensors),
    "other version": lambda whole, tensors, header: save(tensors, header | {"format": "foveate-chunk-0"}),
    "no text": lambda whole, tensors, header: save(tensors, {name: header[name] for name in header if name != "text"}),
    "no ids": lambda whole, tensors, header: save({name: tensors[name] for name in ("keys", "values")}, header),
    "no scales": lambda whole, tensors, header: save(tensors | {"keys": tensors["keys"].to(torch.int8)}, header),
    "no values": lambda whole, tensors, header: save({name: tensors[name] for name in ("ids", "keys")}, header),
    "short keys": lambda whole, tensors, header: save(tensors | {"keys": tensors["keys"][:, :, 1:].clone()}, header),
    "other ids": lambda whole, tensors, header: save(tensors | {"ids": tensors["ids"].flip(0)}, header),
    "one id": lambda whole, tensors, header: save(tensors | {"ids": torch.tensor(3)}, header),
    "other dtype": lambda whole, tensors, header: save(tensors | {"values": tensors["values"].half()}, header),
    "flipped key": lambda whole, tensors, header: save(tensors | {"keys": flipped(tensors["keys"], 123)}, header),
    "flipped value": lambda whole, tensors, header: save(tensors | {"values": flipped(tensors["values"], -1)}, header),
    "negated keys": lambda whole, tensors, header: save(tensors | {"keys": -tensors["keys"]}, header),
    "NaN": lambda whole, tensors, header: save(tensors | {"values": tensors["values"] * torch.nan}, header),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_refused(damage, tmp_path):
    ours, path = encoder(), tmp_path / "chunk.safetensors"
    ours.encode([DOCUMENTS[0]])[0].save(path)
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in ("ids", "keys", "values")}
    path.write_bytes(DAMAGES[damage](path.read_bytes(), tensors, header))
    with pytest.raises(ValueError, match=r"chunk\.safetensors .*encode the document again"):
        ChunkCache.load(path, ours)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        ChunkCache.load(tmp_path / "none.safetensors", encoder())


def test_bad_documents_are_refused_before_anything_is_computed():
    ours = encoder(max_position_embeddings=20)
    (kept,) = ours.encode([DOCUMENTS[0]])
    keys = kept.keys.clone()
    calls = []
    hook = ours.row_model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="document 1 is empty"):
        ours.encode([DOCUMENTS[0], ""])
    with pytest.raises(
        ValueError, match="document 1 with its prefix: 21 tokens, but the model takes at most 20; split it"
    ):
        ours.encode([DOCUMENTS[0], [5] * 19])
    with pytest.raises(ValueError, match=r"3 chunks with their prefix: 23 tokens, .* compose fewer"):
        ours.compose([kept] * 3)
    with pytest.raises(ValueError, match="at least one chunk"):
        ours.compose([])
    context = ours.compose([kept, kept])
    with pytest.raises(ValueError, match="context and prompt: 21 tokens, but the model takes at most 20"):
        context.score([3] * 5, [1])
    with pytest.raises(ValueError, match="the prompt is empty"):
        context.score("", [1])
    hook.remove()
    assert not calls
    assert torch.equal(kept.keys, keys)


@pytest.mark.usefixtures("as_a_user")
def test_arguments_of_the_wrong_kind_are_refused():
    ours = encoder()
    context = ours.compose(ours.encode([DOCUMENTS[0]]))
    with pytest.raises(ValueError, match=r"pass a list of documents, not one text: \['w1 w2'\]"):
        ours.encode("w1 w2")
    with pytest.raises(ValueError, match=r"pass a list of prompts, not one text: \['w1'\]"):
        context.answers(InfoFlowKV(), "w1")
    with pytest.raises(ValueError, match=r"a list of token ids, not the number 5: \[5\]"):
        ours.encode([5, 6])
    for token in (64, -1):
        for attempt in (lambda ids: ours.encode([ids]), lambda ids: context.patch(InfoFlowKV(), ids)):
            with pytest.raises(
                ValueError, match=f"token id {token} is outside the model's vocabulary, 0 to 63: use its own"
            ):
                attempt([5, token])


def test_a_document_that_overflows_is_refused():
    ours = encoder(dtype=torch.float16)
    with torch.no_grad():
        ours.model.model.layers[2].self_attn.v_proj.weight.fill_(6e4)
    with pytest.raises(ValueError, match="document 0 overflows float16: load the model in bfloat16 or float32"):
        ours.encode([DOCUMENTS[0]])


def test_the_error_names_the_field_that_extends_the_context():
    ours = encoder("qwen3", "yarn", max_position_embeddings=40)
    with pytest.raises(
        ValueError, match=r"at most 40; split it, or load .* max_position_embeddings=128, the reach of yarn"
    ):
        ours.encode([[5] * 40])
    with pytest.raises(ValueError, match=r"at most 40; split it$"):
        encoder("qwen3", max_position_embeddings=40).encode([[5] * 40])


REFUSED = {
    "partial_rotary_factor=0.5": lambda: language_model(
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    ),
    "'flex_attention' attention cannot attend by rows": lambda: language_model(attn_implementation="flex_attention"),
    "pass the LlamaForCausalLM itself, not LlamaModel": lambda: language_model().model,
    r"call model\.eval": lambda: language_model().train(),
    "must be on one device, not on meta": lambda: language_model().to("meta"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_models_are_refused_with_the_reason(message):
    model = REFUSED[message]()
    with pytest.raises(ValueError, match=message):
        ChunkEncoder(model, tokenizer())


def test_the_cache_has_the_name_that_the_installed_transformers_gives_it():
    """It was past_key_values before transformers 5.24."""
    assert CACHE in inspect.signature(language_model().model.forward).parameters
    assert CACHE in inspect.signature(language_model().forward).parameters
