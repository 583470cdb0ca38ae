import sys
from pathlib import Path
import numpy as np
from PIL import Image
out = Path(sys.argv[1])
folders = sorted(p for p in out.rglob("*") if p.is_dir() and (p / "00000.png").exists())
print([f.name for f in folders])
load = lambda p: np.asarray(Image.open(p).convert("RGB"), dtype=float)
for i, a in enumerate(folders):
    for b in folders[i + 1:]:
        psnr = []
        for p in sorted(a.glob("*.png")):
            if (b / p.name).exists():
                e = ((load(p) - load(b / p.name)) ** 2).mean()
                psnr.append(10 * np.log10(255**2 / max(e, 1e-3)))
        print(f"{a.name} | {b.name}: mean PSNR {np.mean(psnr):.2f}, median {np.median(psnr):.2f}, tenth {np.percentile(psnr, 10):.2f}, n {len(psnr)}")
