"""Laws of loading language models: the right dtype, and clear errors."""

from datetime import datetime

import pytest
import torch
from tiny_lm import DOCUMENTS, PROMPTS, full_logits, language_model, tokenizer
from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig

from foveate.methods import InfoFlowKV
from foveate.transformers import ChunkEncoder
from foveate.transformers.model import chat_frame, check_config, check_model, load_model

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    language_model("mistral", dtype=torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_models_load_in_float32_on_a_cpu_or_in_the_given_dtype(folder):
    for dtype, want in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        model, words = load_model(folder, "cpu", dtype)
        assert model.dtype == want
        assert not model.training
        assert words("w1 w2").input_ids == tokenizer()("w1 w2").input_ids
    expected = language_model("mistral", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def write_gguf(lm, path):
    gguf = pytest.importorskip("gguf")
    config, writer = lm.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = ["<s>", "</s>", "<unk>", "ab", "a", "b"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words + [f"x{i}" for i in range(config.vocab_size - len(words))])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in lm.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore")  # of the package gguf
def test_a_gguf_file_is_dequantised_and_read_like_its_model(tmp_path):
    lm = language_model("qwen2", dtype=torch.float32)
    write_gguf(lm, tmp_path / "tiny.GGUF")
    model, words = load_model(tmp_path / "tiny.GGUF", "cpu", check=check_config)
    for name, weight in lm.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert words("aba", add_special_tokens=False).input_ids == [3, 4]
    ids = [3, 4, 5]
    ours, theirs = (ChunkEncoder(each, tokenizer()).encode([ids])[0] for each in (model, lm))
    assert torch.equal(ours.keys, theirs.keys)
    with pytest.raises(ValueError, match=r"cannot load .*none.gguf: "):
        load_model(tmp_path / "none.gguf", "cpu")


def test_a_gguf_file_needs_a_transformers_that_reads_its_tokenizer(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr("importlib.metadata.version", lambda package: "5.17.0")
    with pytest.raises(ImportError, match=r"transformers>=5\.18 is required.*found transformers==5\.17\.0"):
        load_model(tmp_path / "tiny.gguf", "cpu")


@pytest.mark.filterwarnings("ignore:torch")  # quantisation is deprecated
def test_quantised_and_compiled_models_are_refused_with_their_remedy(as_a_user):
    lm = language_model(dtype=torch.float32)
    lm.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}  # of earlier weights
    check_model(lm)
    with pytest.raises(ValueError, match=r"the model is compiled, .*: pass it without torch.compile"):
        check_model(torch.compile(lm))
    with pytest.raises(ValueError, match=r"weights are quantised, such as .*q_proj.*; load the model in bfloat16"):
        check_model(torch.ao.quantization.quantize_dynamic(lm, {torch.nn.Linear}))
    lm.model.layers[0].mlp.up_proj.weight.data = lm.model.layers[0].mlp.up_proj.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"weights are quantised, such as model.layers.0.mlp.up_proj.weight"):
        check_model(lm)
    lm.config.quantization_config = {"quant_method": "mxfp4", "dequantize": True}
    check_config(lm.config)


def test_loading_errors_are_one_line(folder, tmp_path):
    with pytest.raises(ValueError, match="cannot load nobody/nothing: "):
        load_model("nobody/nothing", "cpu")
    with pytest.raises(ValueError, match="cannot load "):
        load_model(tmp_path, "cpu")
    with pytest.raises(ValueError, match="unknown dtype 'int4'"):
        load_model(folder, "cpu", "int4")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(), "work with Llama, .* and LlavaOnevision, not Gemma2Config: other models are not tested"),
        (GPT2Config(), "not GPT2Config: it has no rotary positions"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "lets tokens see later ones"),
        (LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "are quantised"),
    ],
)
def test_models_are_refused_by_their_config_before_weights_are_loaded(config, message, tmp_path):
    config.save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, "cpu", check=check_config)


def test_a_chat_template_tells_the_given_date():
    words = tokenizer()
    words.chat_template = (  # as in Llama 3.2 and GPT-OSS
        "{{- bos_token }}{%- macro opening() %}{{ strftime_now('%Y-%m-%d') }}{%- endmacro %}"
        "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}{%- endif %}"
        "{{- ' ' + today + ' ' + opening() + ' ' }}{%- for m in messages %}{{ m['content'] }}{%- endfor %}"
    )
    assert chat_frame(words, date="2025-01-02") == ("<s> 02 Jan 2025 2025-01-02 ", "")
    assert str(datetime.now().year) in chat_frame(words)[0]


def test_a_chat_frame_surrounds_the_message_of_the_user():
    words = tokenizer()
    words.chat_template = CHAT
    before, after = chat_frame(words)
    assert before + "w1 w2" + after == words.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], tokenize=False, add_generation_prompt=True
    )
    assert before == "<s>[user]"
    assert chat_frame(words, chat=False) == chat_frame(tokenizer()) == ("<s>", "")
    assert chat_frame(tokenizer(bos=None)) == ("", "")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: leave chat out"),
        (CHAT.replace("trim", "upper"), "changes the user's message"),
        (CHAT.replace("[end]", "{{ m['content'] }}"), "changes the user's message"),
    ],
)
def test_chat_templates_that_change_the_message_are_refused(template, message):
    words = tokenizer()
    words.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_frame(words, chat=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_8_bits_are_exact_to_the_rounding_of_the_activations(kind, dtype, bound):
    """Unquantised, the same model differs from its full prefill by 4e-6 (float32) and 0.21 (bfloat16)."""
    quantization = pytest.importorskip("torchao.quantization")
    lm = language_model("qwen3", dtype=dtype)
    plain = ChunkEncoder(lm, tokenizer(), "<s> w60").fingerprint
    quantization.quantize_(lm, getattr(quantization, kind)())
    ours = ChunkEncoder(lm, tokenizer(), "<s> w60")
    assert ours.fingerprint["weights"] != plain["weights"]
    context = ours.compose(ours.encode(DOCUMENTS))
    with context.patch(InfoFlowKV(recompute=1.0), PROMPTS[1]) as patched:
        assert (patched.logits() - full_logits(ours, context, PROMPTS[1])).abs().max() < bound
        assert patched.fidelity() < 2e-3
