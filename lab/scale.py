"""Predicted time of a denoising step on several GPUs under Ulysses, and images an hour, by a simple cost model.

python -m lab.scale     # prints the tables of docs/scale.md

Times of one GPU are measured and read from `lab/results`; the rest is arithmetic. Under Ulysses every GPU holds a part
of the tokens, and in each attention layer exchanges queries, keys, values and outputs for all tokens of a part of the
heads. A step takes compute / GPUs + exchange, and exchanges do not overlap with compute, as in diffusers.
"""

import json
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
LINKS = {"NVLink": 150e9, "400 Gb/s network": 50e9}
"""Bytes a second that one GPU sends: over NVLink as measured on two H200; over a 400 Gb/s adapter at best."""
BYTES = 2  # bytes of a bfloat16


class Step(NamedTuple):
    """One denoising step.

    Attributes:
        name: Name in the tables.
        file: File of the measured times in `lab/results`.
        tokens: Tokens of the attention sequence.
        channels: Channels of all heads together.
        layers: Self-attention layers.
        steps: Denoising steps of an image or video.
    """

    name: str
    file: str
    tokens: int
    channels: int
    layers: int
    steps: int

    def seconds(self, variant: str) -> float:
        """Measured seconds on one GPU."""
        rows = json.loads((RESULTS / self.file).read_text())["rows"]
        return next(row["step_s"] for row in rows if row["variant"] == variant)

    def sent(self, gpus: int) -> float:
        """Bytes that one GPU sends in a step: a part of q, k, v and the output of each layer to each other GPU."""
        return 4 * BYTES * self.layers * self.tokens * self.channels * (gpus - 1) / gpus**2

    def on(self, gpus: int, variant: str, bandwidth: float) -> float:
        """Seconds on several GPUs."""
        return self.seconds(variant) / gpus + self.sent(gpus) / bandwidth


STEPS = (
    Step("FLUX.2-dev, 2048 px", "step-flux2-dev-compiled-cuda.json", 128 * 128 + 512, 6144, 56, 50),
    Step("Wan 14B, 81 frames of 720p", "step-wan-14b-compiled-cuda.json", 21 * 45 * 80, 5120, 40, 50),
)
VARIANTS = ("dense", "HilbertA T=16")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def latency(step: Step) -> str:
    """Seconds of a step and speed-up over one dense GPU, by number of GPUs, link and variant."""
    dense = step.seconds("dense")
    rows = [
        [
            str(gpus),
            f"{step.sent(gpus) / 1e9:.2f} GB",
            *(
                f"{(t := step.on(gpus, variant, link)):.3f} s, {dense / t:.1f}x"
                for link in LINKS.values()
                for variant in VARIANTS
            ),
        ]
        for gpus in (1, 2, 4, 8)
    ]
    columns = [f"{variant}, {link}" for link in LINKS for variant in VARIANTS]
    return f"**{step.name}**\n\n" + table(["GPUs", "sent by each GPU", *columns], rows)


def throughput() -> str:
    """Images an hour by number of GPUs: each image on one GPU, or on the eight of a host."""
    rows = []
    for step in STEPS:
        for variant in VARIANTS:
            one = 3600 / (step.steps * step.seconds(variant))
            host = 3600 / (step.steps * step.on(8, variant, LINKS["NVLink"]))
            wait = step.steps * step.seconds(variant), step.steps * step.on(8, variant, LINKS["NVLink"])
            rows.append([
                f"{step.name}, {variant}", *(f"{gpus * one:,.0f} / {gpus // 8 * host:,.0f}" for gpus in (8, 64, 512)),
                f"{wait[0]:.0f} s / {wait[1]:.0f} s",
            ])  # fmt: skip
    return table(["one image on 1 GPU / on 8", "8 GPUs", "64 GPUs", "512 GPUs", "time of one"], rows)


if __name__ == "__main__":
    print("\n\n".join([*map(latency, STEPS), throughput()]))
