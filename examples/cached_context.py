"""Documents that a language model reads once: InfoFlow KV recomputes the few tokens that a question needs.

foveate demo texts                                # writes documents in the words of the built-in reader
python examples/cached_context.py texts/facts "Emil lives in what?" --documents 6
python examples/cached_context.py notes "Question: where was the keeper from? Answer:" --model Qwen/Qwen3-8B
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foveate import InfoFlowKV
from foveate.methods.baselines.kv_baselines import FullPrefill, NoRecompute
from foveate.transformers import ChunkEncoder
from foveate.transformers.documents import SEPARATOR
from foveate.transformers.readers import read_documents
from foveate_models import find

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="folder of documents")
parser.add_argument("question")
parser.add_argument("--model", default=find("reader"), help="hub id or folder; without it the built-in reader")
parser.add_argument("--documents", type=int, help="read only the first of them")
parser.add_argument("--tokens", type=int, default=16, help="length of the answer")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
model.to("cuda" if torch.cuda.is_available() else "cpu")
encoder = ChunkEncoder(model, AutoTokenizer.from_pretrained(args.model))

# once: each document is encoded alone; `chunk.save(path)` keeps its keys and values for later
texts = [text.strip() + SEPARATOR for text in read_documents(args.folder).values()]
chunks = encoder.encode(texts[: args.documents])

# for each question: compose chunks in any order, repair a few rows, answer
context = encoder.compose(chunks)
for method in (NoRecompute(), InfoFlowKV(recompute=0.15), FullPrefill()):
    with context.patch(method, args.question) as patched:
        answer, rows = patched.generate(max_new_tokens=args.tokens), len(patched.rows)
        print(f"{type(method).__name__}: {answer!r}, {rows} of {len(context)} rows recomputed")
        print(f"  KL divergence from the full prefill: {patched.fidelity():.3f}")
