import sys, os, subprocess
sys.path.insert(0, os.path.dirname(__file__))
import torch
from trial import data, timed, rel
from foveate import HilbertA
which = sys.argv[1]
if which == "all":
    for w in ("base", "fp8 spilled", "fp8 one sum", "bf16 late", "rounding"):
        try:
            r = subprocess.run([sys.executable, __file__, w], capture_output=True, text=True, timeout=32)
            print(w, r.stdout.strip() or r.stderr[-400:], flush=True)
        except subprocess.TimeoutExpired as e:
            print(w, "timed out", e.stdout, flush=True)
    sys.exit()
from functools import partial
from foveate.kernels.block import block_attention as ops, block_attention_fp8 as ops8, hopper_attention
from foveate.kernels.block import round_inputs as rounding
from foveate.ops.block_attention import block_attention
if which == "fp8 one sum":
    import fp8_b
    ops8.hopper_fp8 = fp8_b
if which == "bf16 late":
    import bf16_b
    ops.hopper_attention = bf16_b
precision = "fp8" if which.startswith("fp8") else "input"
if which == "base":
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    xs = data(16896)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        print("cudnn", timed(lambda: scaled_dot_product_attention(*xs), 3, 5), flush=True)
if which == "rounding":
    xs = data(16896)
    for rows, warps in ((128, 8), (64, 4), (64, 8), (128, 16), (256, 16)):
        rounding.ROWS, rounding.WARPS = rows, warps
        k, v = xs[1:]
        torch.cuda.synchronize()
        rounding._launch_round.__closure__  # noqa: B018
        for f in (rounding._launch_round, rounding._launch_settle):
            [c.cell_contents.clear() for c in f.__closure__ if isinstance(c.cell_contents, dict)]
        print(rows, warps, round(timed(lambda: rounding.round_inputs(*xs)), 4), flush=True)
    sys.exit()
for side, tiles in ((128, 16), (128, 1), (64, 16)):
    t = HilbertA(tiles=tiles).plan(((side, side),), 512).tables[0 if tiles == 1 else 1]
    xs = data(t.query_tokens)
    with torch.no_grad():
        o = block_attention(*xs, t, precision=precision)
        some = [x[:, [0, -1]] for x in xs]
        if tiles == 1:
            rows = torch.arange(0, t.query_tokens, 97, device="cuda")
            want = torch.softmax(some[0][:, :, rows].double() @ some[1].double().mT * 128**-0.5, -1) @ some[2].double()
            e = rel(o[:, [0, -1]][:, :, rows], want)
        else:
            from foveate.ops.block_attention import portable
            e = rel(o[:, [0, -1]], portable(*(x.double() for x in some), t, 128**-0.5, True)[0])
        ms = timed(lambda: block_attention(*xs, t, precision=precision))
    print(f"| {side*16} px T={tiles}: {ms:.4f} ms, {t.flops(24, 128) / ms / 1e9:.0f} TF, error {e:.4f}", flush=True)
