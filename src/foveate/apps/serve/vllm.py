# pyright: basic, reportMissingImports=false
"""A connector for vLLM: prompts that begin with passages of an index get composed rows instead of a prefill.

vLLM makes two connectors. The connector in the scheduler recognises prompts and reports how many of their tokens need
no prefill. The connector in the worker composes the keys and values of these tokens, with a copy of the model that can
recompute single rows, and writes them into the blocks of vLLM's cache.

Only whole blocks are written; vLLM computes the remaining rows and the question. It then finds all composed rows of a
repeated prompt in its prefix cache, where a salt separates them from other prompts.
"""

import logging
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index

from foveate.methods import recompute_policy_from_text
from foveate.transformers import ChunkEncoder
from foveate.transformers.control_tokens import SafeTokenizer
from foveate.transformers.fingerprint import digest
from foveate.transformers.index import ChunkIndex
from foveate.transformers.known_prompt import KnownPrompt, PromptMatcher, paged_slots
from foveate.transformers.model import chat_frame, check_config, load_model
from foveate.transformers.stored_documents import first_document, read_index
from foveate.utils.device import dtype_name

__all__ = ["FoveateConnector"]

logger = logging.getLogger(__name__)


class Load(NamedTuple):
    """Rows that the worker composes and writes in one step.

    Attributes:
        prompt: Prompt with the rows.
        start: First row to write: vLLM's prefix cache has the rows before it.
        slots: Slot in vLLM's cache of each row from `start` on.
    """

    prompt: KnownPrompt
    start: int
    slots: Int[Tensor, "rows"]


class Loads(KVConnectorMetadata):
    """Loads that the connector in the scheduler sends to the worker in one step."""

    def __init__(self, loads: list[Load]) -> None:
        self.loads = loads


class FoveateConnector(KVConnectorBase_V1):
    """Serves prompts from an index of Foveate; see the module.

    Options in `kv_connector_extra_config`: `index`, its folder or URL; `method`, "epic" by default; options of the
    method such as `recompute`; `prefix` and `chat`, the same as for `foveate rag index`.

    Raises:
        ValueError: If an option, the model or the set-up of vLLM is not supported.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        self._place, chat, prefix = options.pop("index", ""), options.pop("chat", None), options.pop("prefix", "")
        method = options.pop("method", "epic")
        self._method = recompute_policy_from_text(method, {name: str(value) for name, value in options.items()})
        self._check(vllm_config, kv_cache_config)
        self._model, self._block_size = vllm_config.model_config, vllm_config.cache_config.block_size
        tokenizer: Any = AutoTokenizer.from_pretrained(self._model.model)
        first = first_document(self._place)
        self._prefix = chat_frame(tokenizer, chat, first.made["date"] if first else "")[0] + prefix
        if role == KVConnectorRole.SCHEDULER:
            self._matcher = self._new_matcher(tokenizer)
            self._prompts: dict[str, KnownPrompt] = {}  # of unfinished requests
            self._loads: list[Load] = []
        else:
            self._index = self._open_index(vllm_config.device_config.device.type)
            self._layers: list[str] = []
            self._failed: set[int] = set()  # blocks

    def _check(self, vllm_config: Any, kv_cache_config: Any) -> None:
        if not self._place:
            raise ValueError('name the index in kv_connector_extra_config: {"index": "FOLDER or URL"}')
        if getattr(self._method, "reorder", False):
            raise ValueError("reorder moves passages, but the tokens of a prompt stay where they are: leave it out")
        if (processes := vllm_config.parallel_config.world_size) != 1:
            raise ValueError(f"rows are composed on one device, not on {processes}: leave parallel sizes at 1")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("all layers must share their blocks: pass --disable-hybrid-kv-cache-manager")

    def _new_matcher(self, tokenizer: Any) -> PromptMatcher:
        skipped: list[str] = []
        found = (passage for document in read_index(self._place, skipped) for passage in document.passages)
        texts = [passage.text for passage in found if not passage.image]  # a prompt's tokens do not tell its images
        if not texts:
            raise ValueError("; ".join(skipped) or f"{self._place} is no index: make one with `foveate rag index`")
        safe = SafeTokenizer(tokenizer)
        passages = [safe.text(text) for text in texts]
        return PromptMatcher(safe.fill(self._prefix, {}), passages, self._model.hf_text_config.max_position_embeddings)

    def _open_index(self, device: str) -> ChunkIndex:
        model, tokenizer = load_model(self._model.model, device, dtype_name(self._model.dtype), check_config)
        return ChunkIndex(self._place, ChunkEncoder(model, tokenizer, self._prefix))

    # --- in the scheduler --------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Recognise a prompt, and salt the hashes of its blocks in vLLM's prefix cache."""
        special = request.prompt_embeds is not None or request.has_encoder_inputs or request.lora_request
        prompt = None if special else self._matcher.match(request.prompt_token_ids)
        if prompt is None or request.skip_reading_prefix_cache:
            return
        self._prompts[request.request_id] = prompt
        request.cache_salt = digest([request.cache_salt, prompt.salt(self._method)])
        request.block_hashes.clear()
        request.update_block_hashes()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Number of rows to write besides vLLM's cached ones; always before the next forward pass."""
        prompt = self._prompts.get(request.request_id)
        return (max(0, self._whole(prompt) - num_computed_tokens) if prompt else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the target blocks of a prompt's rows."""
        if num_external_tokens:
            prompt, (numbers,) = self._prompts[request.request_id], blocks.get_block_ids()
            stop = self._whole(prompt)
            start = stop - num_external_tokens
            self._loads.append(Load(prompt, start, paged_slots(numbers, self._block_size, start, stop)))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Loads for the worker in this step."""
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a prompt. Its blocks may be freed at once."""
        self._prompts.pop(request.request_id, None)
        return False, None

    def _whole(self, prompt: KnownPrompt) -> int:
        return prompt.rows - prompt.rows % self._block_size

    # --- in the worker -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Record the names of the attention layers in order."""
        self._layers = sorted(kv_caches, key=extract_layer_index)
        expected = self._index.encoder.cache_shape(1, 1)[0]
        if len(self._layers) != expected:
            raise ValueError(
                f"vLLM caches {len(self._layers)} layers, the model has {expected}: run it without a draft model"
            )

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Compose and write the rows of this step.

        On failure vLLM follows `kv_load_failure_policy`: the request fails, or is prefilled.
        """
        for prompt, start, slots in self._get_connector_metadata().loads:
            try:
                states = prompt.compose(self._index, self._method)
            except (OSError, ValueError, torch.OutOfMemoryError) as error:
                logger.error("no rows for a prompt of %d tokens: %s", len(prompt.ids), error)
                self._failed |= set((slots // self._block_size).tolist())
                continue
            slots = slots.to(states[0].device)
            for name, *rows in zip(self._layers, *states, strict=True):
                layer = forward_context.no_compile_layers[name]
                keys, values = (some[start : start + len(slots)].contiguous() for some in rows)
                layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of the blocks that could not be written."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` has written all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **options: Any) -> None:
        """Do nothing: the index has its own copies."""

    def wait_for_save(self) -> None:
        """Do nothing."""
