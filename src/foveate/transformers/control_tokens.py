# pyright: basic
"""Token ids of texts and of templates: only templates make control tokens, such as the end of a turn."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

__all__ = ["SafeTokenizer"]


class SafeTokenizer:
    """Tokenizer of texts by anybody, and of templates around them.

    The names of control tokens in a text stay text. Control tokens are the special tokens, and what else the chat
    template writes; the unknown token is none of them, because any text may have unknown words.

    Args:
        tokenizer: Tokenizer of a model. It is never changed.

    Attributes:
        for_texts: Copy of the tokenizer that reads the names of control tokens as text.
        for_templates: The tokenizer itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        template = str(getattr(tokenizer, "chat_template", "") or "")
        self._control = {
            number: token.content
            for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if (token.special or (token.content.strip() and token.content in template))
            and number != tokenizer.unk_token_id
        }
        self.for_templates, self.for_texts = tokenizer, deepcopy(tokenizer)  # a switch would disturb other threads
        self.for_texts.split_special_tokens = True
        if getattr(tokenizer, "is_fast", False):  # the switch alone concerns special tokens only
            self.for_texts.backend_tokenizer.add_special_tokens([*self._control.values()])

    def text(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids = self._plain(text)
        if self._control.keys().isdisjoint(ids):
            return ids
        spelled: list[int] = []  # the name of a control token is also a word of the vocabulary
        for token in ids:
            letters = self._control.get(token, "")
            spelled += [part for letter in letters for part in self._plain(letter)] if letters else [token]
        return spelled

    def fill(self, template: str, texts: Mapping[str, str]) -> list[int]:
        """Token ids of a template filled with texts, which make no control tokens: only the template does.

        Args:
            template: The template.
            texts: Text of each place, by what marks the place in the template.
        """
        parts = re.split(f"({'|'.join(map(re.escape, texts))})", template) if texts else [template]
        pieces = (self.text(texts[part]) if part in texts else self._acting(part) for part in parts)
        apart = [token for piece in pieces for token in piece]
        # together, words merge across the borders as in any text of the model; but texts may have made control tokens
        whole = self._acting("".join(texts.get(part, part) for part in parts))
        return whole if self._controls(whole) == self._controls(apart) else apart

    def _plain(self, text: str) -> list[int]:
        return self.for_texts(text, add_special_tokens=False).input_ids

    def _acting(self, text: str) -> list[int]:
        return self.for_templates(text, add_special_tokens=False, split_special_tokens=False).input_ids

    def _controls(self, ids: list[int]) -> list[int]:
        return [token for token in ids if token in self._control]
