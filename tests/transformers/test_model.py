"""Laws of loading language models: the right dtype, and clear errors."""

from datetime import datetime

import pytest
import torch
from tiny_lm import language_model, tokenizer
from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig

from foveate.transformers.model import chat_frame, check_config, load_model

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
        (Gemma2Config(), "work with Llama, .* and GptOss, not Gemma2Config: other models are not tested"),
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
