"""Foveate's nodes for ComfyUI: link or copy this folder into `custom_nodes`."""

from typing import Any

from comfyui_version import __version__

if tuple(map(int, __version__.split(".")[:2])) < (0, 14):  # older ones put HunyuanVideo's image before its text
    raise ImportError(f"Foveate's nodes need ComfyUI 0.14 or newer, and this is {__version__}: update ComfyUI")

from .nodes import NODES

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "comfy_entrypoint"]

NODE_CLASS_MAPPINGS = {node.define_schema().node_id: node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS = {node.define_schema().node_id: node.define_schema().display_name for node in NODES}


async def comfy_entrypoint() -> Any:
    """Extension for newer versions of ComfyUI."""
    from comfy_api.latest import ComfyExtension

    class FoveateExtension(ComfyExtension):
        async def get_node_list(self) -> list[Any]:
            return list(NODES)

    return FoveateExtension()
