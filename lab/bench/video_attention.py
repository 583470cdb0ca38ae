# pyright: reportAttributeAccessIssue=false
"""One call of attention over a video: HilbertA along the curve in three dimensions against cuDNN.

python -m lab.bench.video_attention bench/attention-video-cuda.json
"""

import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from foveate import HilbertA
from foveate.ops.block_attention import block_attention
from foveate.utils.device import versions
from foveate.utils.timing import time_calls

GRID = (21, 45, 80)  # 81 frames of 720p in Wan
METHODS = (
    *(HilbertA(tiles=4), HilbertA(tiles=16)),
    *(HilbertA(tiles=16, centre=0.4), HilbertA(tiles=16, centre=0.0)),
)


def main(path: Path) -> None:
    """Time all variants, interleaved, and write the JSON file."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 21 * 45 * 80, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tables = [method.plan((GRID,), 0).tables[0] for method in METHODS]
    calls = [partial(block_attention, q, k, v, table.to("cuda")) for table in tables]
    calls = [partial(scaled_dot_product_attention, q, k, v), *calls]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # does not affect block_attention
        dense, *taken = map(median, time_calls(calls, 7, torch.device("cuda")))
    rows = [{"method": "dense (cuDNN)", "seconds": dense, "speed_up": 1.0, "flop_bound": 1.0}]
    rows += [
        {"method": m.title, "seconds": s, "speed_up": dense / s, "flop_bound": 1 / (1 - table.sparsity())}
        for m, s, table in zip(METHODS, taken, tables, strict=True)
    ]
    about = {
        "what": "attention over 21 x 45 x 80 tokens, 40 heads of 128",
        "dtype": "bfloat16",
        "versions": versions(),
    }
    path.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
