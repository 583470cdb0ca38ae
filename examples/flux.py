"""FLUX.1 dense and with a method, a preset or a LoRA: two images of the same seed, and what each layer saved.

python examples/flux.py "a lighthouse at dusk"                                # FLUX.1-dev with ToMA
python examples/flux.py "an owl" --model built-in --size 256 --steps 20       # the small model of Foveate
python examples/flux.py "an owl" --model built-in --size 128 --steps 20 --preset built-in-128px-ssim-0.95
python examples/flux.py "an owl" --model built-in --size 256 --steps 20 --lora built-in-16
"""

import argparse
from pathlib import Path

import torch
from diffusers import FluxPipeline

import foveate
from foveate.pipelines.lora import find_lora, load_lora, using
from foveate_models import find

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev", help="hub id, folder, or built-in")
parser.add_argument("--size", type=int, default=1024, help="pixels")
parser.add_argument("--steps", type=int, default=28)
parser.add_argument("--preset", help="file that foveate.tune made, or a preset of Foveate: it names the methods")
parser.add_argument("--lora", help="folder of foveate distill, hub id, or built-in-16: it names its method")
parser.add_argument("--out", type=Path, default=Path(), help="folder for dense.png and sparse.png")
args = parser.parse_args()

folder = find("pipeline") if args.model == "built-in" else args.model
device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
pipe = FluxPipeline.from_pretrained(folder, dtype=dtype).to(device)


def generate(name: str) -> None:
    """Write the image of the prompt."""
    words = min(512, pipe.tokenizer_2.model_max_length)
    options = {"num_inference_steps": args.steps, "max_sequence_length": words}
    seed = torch.Generator().manual_seed(0)
    image = pipe(args.prompt, height=args.size, width=args.size, generator=seed, **options).images[0]
    image.save(args.out / name)


generate("dense.png")
if args.lora:
    distilled = load_lora(pipe, find_lora(str(find("lora-16")) if args.lora == "built-in-16" else args.lora))
    sparse = using(pipe, distilled)  # the LoRA is on only in steps in which its method works
else:
    sparse = foveate.apply(pipe, foveate.load(args.preset) if args.preset else foveate.ToMA(keep=0.75))
with sparse as run:
    generate("sparse.png")
    print(run.summary())
