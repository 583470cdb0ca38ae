"""A model of your own: it attends through diffusers' dispatcher, and a card tells Foveate where its tokens are.

python examples/own_model.py --size 64 --tiles 4
"""

import argparse

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from torch import nn

import foveate
from foveate.diffusers.card import TokenLayout, image, text


class Block(nn.Module):
    """Attention over [text, image] and a feed-forward layer. The processor calls `dispatch_attention_fn`."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = FluxAttention(dim, heads, dim // heads, processor=FluxAttnProcessor())
        self.ff = FeedForward(dim)

    def forward(self, hidden_states):
        """The tokens after the block."""
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states))
        return hidden_states + self.ff(self.norm2(hidden_states))


class TextAndImage(ModelMixin, ConfigMixin):
    """Blocks over words and the pixels of an image."""

    @register_to_config
    def __init__(self, layers=4, dim=64, heads=2):
        super().__init__()
        self.words, self.pixels, self.out = nn.Embedding(100, dim), nn.Linear(3, dim), nn.Linear(dim, 3)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, hidden_states, words):
        """An image as large as the input [1, 3, rows, columns]."""
        x = torch.cat([self.words(words), self.pixels(hidden_states.flatten(2).mT)], 1)
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, words.shape[1] :]).mT.view_as(hidden_states)


@foveate.register_card("TextAndImage")
class TextAndImageCard(foveate.Card):
    """Every block attends over the words, then the image row by row."""

    blocks = "blocks"

    def layout(self, holder, inputs):
        """The attention sequence of a forward pass."""
        return TokenLayout((text(inputs["words"].shape[1]), image(*inputs["hidden_states"].shape[2:])))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, default=64, help="rows and columns of the image")
parser.add_argument("--tiles", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
model = TextAndImage().eval()
inputs = {"hidden_states": torch.randn(1, 3, args.size, args.size), "words": torch.randint(100, (1, 15))}
with torch.no_grad():
    dense = model(**inputs)
    with foveate.apply(model, foveate.HilbertA(tiles=1)):
        torch.testing.assert_close(model(**inputs), dense)  # one tile is the dense model
    with foveate.apply(model, foveate.HilbertA(tiles=args.tiles)) as run:
        model(**inputs)
    assert torch.equal(model(**inputs), dense)  # removal restores it bit for bit
print(run.summary())
