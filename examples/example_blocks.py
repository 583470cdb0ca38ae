"""Examples for in-context learning, chosen and divided into blocks by Sub-CP; a language model answers with them.

foveate demo texts                                # writes examples in the words of the built-in reader
python examples/example_blocks.py texts/examples.csv "Oslo Milan Hanoi" --blocks 4
python examples/example_blocks.py reviews.csv "Not worth the money." --model Qwen/Qwen3-0.6B
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foveate import SubCP
from foveate.transformers.embeddings import hashed_ngrams
from foveate.transformers.examples import column, read_examples
from foveate.transformers.in_context import prompt_with
from foveate_models import find

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("examples", type=Path, help=".csv or .jsonl file with the columns text and label")
parser.add_argument("question")
parser.add_argument("--blocks", type=int, default=8)
parser.add_argument("--size", type=int, default=8, help="examples in a block")
parser.add_argument("--model", default=find("reader"), help="hub id or folder; without it the built-in reader")
args = parser.parse_args()

rows = read_examples(args.examples)
texts, labels = (column(rows, name, args.examples) for name in ("text", "label"))
embeddings = hashed_ngrams(texts)  # or those of any model, [examples, dim]
blocks = SubCP(blocks=args.blocks, block_size=args.size).partition(embeddings)
report = blocks.report(labels)
print(f"the {args.blocks} blocks cover {report.union_coverage:.1%} of the pool, each {report.mean_coverage:.1%}")

model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
model.to("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(args.model)
prompts = [[f"{texts[i]} -> {labels[i]}. " for i in block] for block in blocks.ids]
weights = blocks.weights(hashed_ngrams([args.question])[0])  # blocks that are near to the question weigh more
answers = sorted(set(labels))
for host in ("concatenate", "ensemble", "parallel_windows"):
    prompted = prompt_with(model, tokenizer, prompts, host)
    chances = prompted.probabilities(f"{args.question} ->", [f" {answer}" for answer in answers], weights)
    print(f"{host}: {answers[int(chances.argmax())]} with probability {chances.max():.3f}")
