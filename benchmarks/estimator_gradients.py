"""Estimators of R on a trained network: ``python -m benchmarks.estimator_gradients CKPT``.

R and its gradient by ``jvp`` and by differences of several β, in float64, at the same training and
p_X images and the same ψ, BatchNorm as in training (``joint``). As β falls R agrees. The gradients
need not: a ReLU that changes sides between θ and θ + βψ is a jump of J, which counts 1/β and which
``jvp``, the gradient at θ, does not know. ``--activation gelu`` puts a smooth function in place
of ReLU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsmap
from fsmap.files import circumstances
from fsmap.functional import Replacing
from fsmap.images.build import load_data, load_model

RESULTS = Path(__file__).parent / "results" / "estimator_gradients.jsonl"
ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu}


def images(settings: Any, px: str, number: int) -> Tensor:
    """As many training images as images of p_X, normalized."""
    task = load_data(settings, px=px)
    assert task.px is not None
    found = (task.train.x[:number], task.px.sources[0].images[:number])
    return torch.cat([task.normalize(x, torch.float64) for x in found])


def gradients(
    module: nn.Module, x: Tensor, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """R and its gradient by each estimator, beside those of ``jvp``."""
    f, params = fsmap.functional(module)
    generator = torch.Generator().manual_seed(0)
    ways = [("jvp", 0.0), *(("fd", beta) for beta in options.betas)]
    found: dict[tuple[str, float], list[tuple[float, Tensor]]] = {way: [] for way in ways}
    for _ in range(options.probes):
        psi = {
            name: torch.randn((1, *p.shape), generator=generator, dtype=p.dtype)
            for name, p in params.items()
        }
        for method, beta in ways:
            more = {"beta": beta} if beta else {}
            with Replacing({torch.relu: ACTIVATIONS[options.activation]}):
                R = fsmap.trace(f, params, x, method=method, probes=psi, **more).value
                grads = torch.autograd.grad(R, list(params.values()), materialize_grads=True)
            flat = torch.cat([g.flatten() for g in grads])
            found[method, beta].append((R.item(), flat))
    own = [g for _, g in found["jvp", 0.0]]
    for (method, beta), values in found.items():
        theirs = [g for _, g in values]
        each = [float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(own, theirs, strict=True)]
        means = (torch.stack(side).mean(0) for side in (own, theirs))
        yield {
            "estimator": method,
            "beta": beta or None,
            "R": statistics.fmean(R for R, _ in values),
            "norm": statistics.fmean(float(g.norm()) for g in theirs),
            "cosine": statistics.fmean(each),
            "cosine_of_means": float(F.cosine_similarity(*means, dim=0)),
        }


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="of fsmap train")
    parser.add_argument("--name", help="how rows call it; its folder's name")
    parser.add_argument("--px", default="cifar100")
    parser.add_argument("--points", type=int, default=16, help="of each kind")
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--betas", type=float, nargs="+", default=[1e-3, 1e-4, 1e-5])
    parser.add_argument("--activation", choices=ACTIVATIONS, default="relu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    module, progress = load_model(options.checkpoint)
    x = images(progress["settings"], options.px, options.points)
    about = {"network": options.name or options.checkpoint.parent.name, "points": len(x)}
    about.update(activation=options.activation, probes=options.probes)
    print(f"{'estimator':9} {'β':>7} {'R':>10} {'gradient':>10} {'cosine':>7} {'of means':>9}")
    for row in gradients(module.double().train(), x, options):
        print(
            f"{row['estimator']:9} {row['beta'] or 0:7g} {row['R']:10.4g} {row['norm']:10.4g} "
            f"{row['cosine']:7.3f} {row['cosine_of_means']:9.3f}",
            flush=True,
        )
        with options.out.open("a") as file:
            file.write(json.dumps(about | row | circumstances("cpu")) + "\n")


if __name__ == "__main__":
    main()
