import triton, quant, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from comp import stats
for kernel, more in ((quant.quantise, {}), (quant.settle, dict(BR=128, PROGRAMS=4))):
  for bt, w in ((64,4),(128,4),(128,8),(256,8)):
    consts = dict(D=128, BT=bt, SAMPLES=32, **more)
    kinds = {n: "*bf16" if n in ("p_q","p_k","p_v") else "*fp8e4nv" if n.startswith("o_") else "*fp32" if n.startswith("p_") else "fp32" if n=="factor" else "i32" for n in kernel.arg_names}
    kinds |= dict.fromkeys(consts, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.startswith(("p_", "s_", "o_")) or n == "padded"}
    res = triton.compile(ASTSource(kernel, kinds, consts, attrs), target=GPUTarget("cuda", 90, 32), options={"num_warps": w})
    r, sh, ops, sass = stats(res)
    print(kernel.__name__, bt, w, r, sh, ops.most_common(12))
