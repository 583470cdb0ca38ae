# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""The First Block Cache of diffusers, which here remembers each image separately.

Several threads or pipelines may generate images with one model at the same time, and every image begins anew.
"""

from collections.abc import Callable

from diffusers.hooks.first_block_cache import FBCHeadBlockHook, FBCSharedBlockState, FirstBlockCacheConfig
from torch import nn

from foveate.diffusers.clock import Step
from foveate.diffusers.preset import StepCache

__all__ = ["InstalledCache"]


class InstalledCache:
    """A step cache at work in one model.

    Args:
        model: The denoiser.
        cache: When steps are skipped.
        current: Returns the state in the current forward pass: see `state`.

    Raises:
        ValueError: If diffusers has no cache for the model, or the model has one already. The model is left as it was.
    """

    def __init__(self, model: nn.Module, cache: StepCache, current: Callable[[], FBCSharedBlockState]) -> None:
        name, self.model, self.cache = type(model).__name__, model, cache
        self._config = FirstBlockCacheConfig(cache.threshold)
        none = f"diffusers has no First Block Cache for {name}: use a preset without a step cache"
        if not hasattr(model, "enable_cache"):
            raise ValueError(none)
        if model.is_cache_enabled:
            raise ValueError(f"{name} has a cache already, and the preset brings one: call disable_cache() first")
        try:
            model.enable_cache(self._config)
        except ValueError as error:
            self.remove()
            raise ValueError(none) from error
        registries = (vars(block).get("_diffusers_hook") for block in model.modules())
        hooks = (hook for registry in filter(None, registries) for hook in registry.hooks.values())
        head = next(hook for hook in hooks if isinstance(hook, FBCHeadBlockHook))
        head.state_manager.get_state = current  # that of all blocks

    def state(self, step: Step | None) -> FBCSharedBlockState:
        """What the cache keeps from step to step, when a forward pass begins; None: it is computed and forgotten."""
        if step is None:
            return FBCSharedBlockState()
        state = step.kept.setdefault(self, FBCSharedBlockState())
        state.should_compute = True  # until the first block decides
        if step.progress < self.cache.start_percent:
            state.head_block_residual = None  # nothing to compare with: the step is computed
        return state

    def remove(self) -> None:
        """Take the cache off, unless the model has another one by now."""
        if self.model._cache_config is None or self.model._cache_config is self._config:
            self.model._cache_config = self._config  # not set yet after an error in `enable_cache`
            self.model.disable_cache()
