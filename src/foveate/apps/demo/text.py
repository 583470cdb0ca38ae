# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
"""The vocabulary of the built-in model, and its two tokenizers, CLIP and T5 as in FLUX."""

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast, T5EncoderModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging

from foveate.apps.demo import MODELS, find
from foveate.apps.demo.atlas import OBJECT_NAMES
from foveate.apps.demo.scenes import BACKGROUNDS, LAYOUTS

__all__ = [
    "TEXT_TOKENS",
    "WORDS",
    "built_in_text_encoder",
    "clip_tokenizer",
    "draws_scenes",
    "t5_tokenizer",
    "unknown_words",
]

TEXT_TOKENS = 64
_END = "</w>"
_WORD = re.compile(r"[^\W_]+|[^\x00-\x7f\s]")  # an emoji is a word
WORDS = tuple(
    sorted(
        {
            word
            for text in (
                *OBJECT_NAMES,
                *BACKGROUNDS,
                *(layout.sentence for layout in LAYOUTS),
                "a",
                "an",
                "on",
                "background",
            )
            for word in _WORD.findall(text)
        }
    )
)


def unknown_words(prompt: str, more: Sequence[str] = ()) -> dict[str, list[str]]:
    """Unknown words of a prompt, each with the known words of most similar spelling.

    Args:
        prompt: The prompt.
        more: Known words besides `WORDS`.
    """
    words, known = dict.fromkeys(_WORD.findall(prompt.lower())), (*WORDS, *more)
    return {word: difflib.get_close_matches(word, known, cutoff=0.5) for word in words if word not in known}


def draws_scenes(pipeline: Any) -> bool:
    """Whether a pipeline has the built-in vocabulary, so that the recogniser knows its objects."""
    tokenizer = getattr(pipeline, "tokenizer_2", None) or getattr(pipeline, "tokenizer", None)
    known = (clip_tokenizer(), *(t5_tokenizer(model.words) for model in MODELS.values()))
    return tokenizer is not None and tokenizer.get_vocab() in [one.get_vocab() for one in known]


def built_in_text_encoder() -> tuple[Any, Any]:
    """The T5 encoder of the built-in model, and its tokenizer."""
    logging.disable_progress_bar()
    encoder = T5EncoderModel.from_pretrained(find("pipeline"), subfolder="text_encoder_2").eval().requires_grad_(False)
    return encoder, AutoTokenizer.from_pretrained(find("pipeline/tokenizer_2"))


def t5_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The T5 tokenizer: WordPiece with a token for each known word; other words are spelled letter by letter.

    Args:
        more: Known words besides `WORDS`.
    """
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["<pad>", "</s>", "<unk>", *letters, *("##" + letter for letter in letters)]
    pieces += [word for word in (*WORDS, *more) if len(word) > 1]
    words = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TEXT_TOKENS
    )


def clip_tokenizer() -> CLIPTokenizer:
    """The CLIP tokenizer: byte pairs, merged until every known word is one token."""
    letters = list(bytes_to_unicode().values())
    tokens = dict.fromkeys([*letters, *(letter + _END for letter in letters)])
    merges = _merges()
    tokens |= dict.fromkeys(first + second for first, second in merges)
    tokens |= dict.fromkeys(("<|startoftext|>", "<|endoftext|>"))
    return CLIPTokenizer({token: i for i, token in enumerate(tokens)}, merges, model_max_length=TEXT_TOKENS)


def _merges() -> list[tuple[str, str]]:
    """The merges that make the known words, the same in every process.

    The last letter of a word is replaced by a private-use character during training. The trainer's own suffix would
    number these letters in the order of a hash table, which differs between processes.
    """
    far = 0xE000

    def near(letters: str) -> str:
        return "".join(letter if ord(letter) < far else chr(ord(letter) - far) + _END for letter in letters)

    pairs = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=100_000, min_frequency=1, show_progress=False)
    pairs.train_from_iterator([word[:-1] + chr(far + ord(word[-1])) for word in WORDS], trainer)
    merges = json.loads(pairs.to_str())["model"]["merges"]
    return [(near(first), near(second)) for first, second in merges]
