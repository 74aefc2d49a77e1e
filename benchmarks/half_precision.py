"""How far R in bf16 autocast is from full precision, compiled and eager: minutes on a CPU.

``python -m benchmarks.half_precision`` appends rows: a ResNet-18 of width 8, random images, B = 64,
S = 32, one row for each draw. ``fsmap.lmap.compiling.HALF_TOLERANCE`` is chosen by them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import fsmap
from fsmap.files import circumstances
from fsmap.models.resnet import resnet18

RESULTS = Path(__file__).parent / "results" / "half_precision.jsonl"
DRAWS, MODE = 12, "batch"


def main() -> None:
    """Measure, append rows, print means and maxima."""
    torch.manual_seed(0)
    model = resnet18(10, width=8).to(memory_format=torch.channels_last)
    x = torch.randn(256, 3, 32, 32).to(memory_format=torch.channels_last)
    found: dict[str, list[float]] = {"compiled": [], "eager": []}
    terms = {how: fsmap.LMAP(model, x, num_points=32, batchnorm=MODE) for how in found}
    terms["compiled"].compile()
    about = {"batchnorm": MODE, **circumstances("cpu")}
    with RESULTS.open("a") as file:
        for draw in range(DRAWS):
            terms["eager"].step = draw
            drawn, R = terms["eager"].draw(x[:64]), {}
            for how, half in (("full", False), ("eager", True), ("compiled", True)):
                lm = terms["eager" if how == "full" else how]
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    R[how] = float(lm(x[:64], drawn=drawn)[1].detach())
            for how, values in found.items():
                values.append(abs(R[how] / R["full"] - 1))
            file.write(json.dumps({"draw": draw, **R, **about}) + "\n")
    for how, values in found.items():
        print(f"{how}: off by {sum(values) / DRAWS:.1%} on average, {max(values):.1%} at most")


if __name__ == "__main__":
    main()
