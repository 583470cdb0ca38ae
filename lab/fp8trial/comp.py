import sys, re, subprocess, tempfile, collections
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout, float8e4nv
import importlib
KINDS = {"p_out": "*bf16", "p_lse": "*fp32", "p_qs": "*fp32", "p_scale": "*fp32", "p_mean": "*fp32"}
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"

def compile(kernel, consts, desc, more=None, warps=4):
    names = kernel.arg_names
    kinds = {n: KINDS.get(n, "*i32" if n.startswith("p_") else "i32") for n in names}
    kinds |= more or {}
    kinds |= dict.fromkeys(consts, "constexpr")
    for n, block in desc.items():
        layout = NVMMASharedLayout.get_default_for(block, float8e4nv)
        kinds[n] = f"tensordesc<fp8e4nv{block},{layout!r}>"
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.startswith(("p_", "s_"))}
    src = GluonASTSource(kernel, kinds, consts, attrs)
    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

def stats(res, show=False):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        Path(f.name).write_bytes(res.asm["cubin"])
        use = subprocess.run([BIN / "cuobjdump", "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([BIN / "nvdisasm", f.name], capture_output=True, text=True).stdout
    m = re.search(r"REG:(\d+) STACK:(\d+)", use)
    ops = collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_]+)", sass))
    return m.groups(), res.metadata.shared, ops, sass

if __name__ == "__main__":
    mod = importlib.import_module(sys.argv[1])
    for v in sys.argv[2:]:
        consts = dict(D=128) | eval(f"dict({v})")
        bn = consts["BN"]
        res = compile(mod.forward, consts, {"d_q": [64, 128], "d_k": [bn, 128], "d_v": [128, bn]})
        reg, shared, ops, sass = stats(res)
        Path(f"/tmp/fp8-{v.replace('=','').replace(',','-')}.sass").write_text(sass)
        print(v, reg, shared, {k: n for k, n in ops.most_common(24)}, "SHFL", ops["SHFL"], "MUFU", ops["MUFU"], "LDL", ops["LDL"], "STL", ops["STL"], flush=True)
