"""How much of R survives a precision: ``python -m benchmarks.image_precision``.

A ResNet-18 is trained for a moment with PS-MAP; then R and its gradient at the same points and the
same ψ are computed in each precision and compared with float64: the relative error of R (root mean
square over ψ) and the cosine between the gradients. Differences of size β are what suffers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsmap.report.circumstances import circumstances
from fsmap.train.images import ImageRun, ImageSettings
from fsmap.train.images.gradient import REGULARIZED, make_gradient
from fsmap.train.images.kernels import kernels

HALF = {"fp64": None, "fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
RESULTS = Path(__file__).parent / "results" / "image_precision.jsonl"


def gradient(run: ImageRun, precision: str, step: int, **changes: Any) -> tuple[float, Tensor]:
    """R and its gradient, flat, in float64."""
    settings = dataclasses.replace(
        run.settings, precision="fp32" if precision == "fp64" else precision, **changes
    )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    run.feeder.prepare(step, REGULARIZED)
    feed = run.feeder.feed(REGULARIZED)
    one = torch.ones((), device=run.device, dtype=dtype)
    small = one * (2.0**-14 if precision == "fp16" else 1.0)  # R alone is large: against overflow
    feed = feed._replace(
        x=feed.x.to(dtype),
        points=feed.points.to(dtype),
        psi={n: p.to(dtype) for n, p in feed.psi.items()},
        reg_strength=one,
        scale=small,
    )
    params = {n: p.detach().to(dtype) for n, p in run._step.params.items()}
    buffers = {
        n: b.to(dtype) if b.is_floating_point() else b for n, b in run.module.named_buffers()
    }
    function = make_gradient(run.module, settings, REGULARIZED, HALF[precision])
    with kernels(settings, run.device):
        found = function(params, buffers, feed)
    flat = torch.cat([g.reshape(-1).double() for g in found.grads])
    return float(found.measured[1]), flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    size = {"width": 64, "batch_size": 128} if cuda else {"width": 4, "batch_size": 32}
    settings = ImageSettings(
        data="cifar10",
        generated=True,
        px="cifar100",
        reg_strength=0.0,
        num_points=size["batch_size"],
        epochs=options.epochs,
        precision="bf16" if cuda else "fp32",
        **size,
    )
    run = ImageRun(settings, device=options.device)
    run.train(progress=False)
    kinds = [p for p in HALF if cuda or p not in ("fp16", "tf32")]
    rows = []
    print(f"{'estimator':10} {'beta':>7} {'precision':9} {'R':>10} {'error':>8} {'cosine':>7}")
    for estimator, beta in (("fd", 1e-3), ("fd", 3e-3), ("fd", 1e-2), ("jvp", 1e-3)):
        changes = {"estimator": estimator, "beta": beta}
        for kind in kinds:
            errors, cosines, values = [], [], []
            for step in range(options.probes):
                true, direction = gradient(run, "fp64", step, **changes)
                value, found = gradient(run, kind, step, **changes)
                errors.append(value / true - 1)
                cosines.append(float(torch.cosine_similarity(direction, found, dim=0)))
                values.append(value)
            row = {
                "estimator": estimator,
                "beta": beta,
                "precision": kind,
                "R": sum(values) / len(values),
                "error": (sum(e * e for e in errors) / len(errors)) ** 0.5,
                "cosine": sum(cosines) / len(cosines),
            }
            rows.append(row | circumstances(options.device)._asdict())
            print(
                f"{estimator:10} {beta:7g} {kind:9} {row['R']:10.4g} {row['error']:8.4f} "
                f"{row['cosine']:7.4f}",
                flush=True,
            )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
