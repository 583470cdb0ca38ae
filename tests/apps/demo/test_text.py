"""Laws of the tokenizers: a known word is one token, an unknown one is named and spelled."""

import itertools
from types import SimpleNamespace

from transformers import AutoTokenizer, CLIPTokenizer

from foveate.apps.demo import MODELS
from foveate.apps.demo.scenes import scenes
from foveate.apps.demo.text import TEXT_TOKENS, WORDS, clip_tokenizer, draws_scenes, t5_tokenizer, unknown_words


def test_every_known_word_is_one_token():
    for tokenizer in (t5_tokenizer(), clip_tokenizer()):
        assert all(len(tokenizer.tokenize(word)) == 1 for word in WORDS)


def test_captions_fit_and_differ_as_tokens():
    captions = {scene.caption for scene in itertools.islice(scenes(0), 3000)}
    for tokenizer in (t5_tokenizer(), clip_tokenizer()):
        ids = tokenizer(sorted(captions)).input_ids
        assert max(map(len, ids)) < TEXT_TOKENS // 2
        assert len({tuple(one) for one in ids}) == len(captions)


def test_unknown_words_are_spelled_and_named_with_similar_ones():
    assert t5_tokenizer().tokenize("zyx cats") == ["z", "##y", "##x", "cat", "##s"]
    assert "".join(clip_tokenizer().tokenize("zyx")) == "zyx</w>"
    unknown = unknown_words("A red aple above an Elefant, an elefant and a zzyzx!")
    assert list(unknown) == ["aple", "elefant", "zzyzx"]
    assert "apple" in unknown["aple"]
    assert unknown["elefant"][0] == "elephant"
    assert unknown["zzyzx"] == []
    assert unknown_words("an owl, a red apple and the sun on an orange background") == {}
    assert list(unknown_words("an owl moves up and down", more=("moves", "up"))) == ["down"]


def test_the_built_in_models_are_known_by_their_words():
    videos = MODELS["built-in-video"].words
    for tokenizer in (t5_tokenizer(), clip_tokenizer(), t5_tokenizer(videos)):
        assert draws_scenes(SimpleNamespace(tokenizer=tokenizer))
    for other in (SimpleNamespace(), SimpleNamespace(tokenizer=t5_tokenizer((*videos, "lighthouse")))):
        assert not draws_scenes(other)


def test_saved_tokenizers_load_again(tmp_path):
    caption = "an owl above a zebra on a pink background"
    clip_tokenizer().save_pretrained(tmp_path / "clip")
    t5_tokenizer().save_pretrained(tmp_path / "t5")
    assert CLIPTokenizer.from_pretrained(tmp_path / "clip")(caption).input_ids == clip_tokenizer()(caption).input_ids
    assert AutoTokenizer.from_pretrained(tmp_path / "t5")(caption).input_ids == t5_tokenizer()(caption).input_ids
