"""A sweep on Ray: every trial is a population, a grid of strengths and seeds trained as one.

Trials are draws of a data set. Without an address Ray starts on this machine; `RayPool("auto")` or
`RayPool("head:6379")` uses a cluster. A worker that dies costs the trial it ran, which is repeated.
Prints, for every draw, the λ that was best on held-out points and the error with it.
"""

import warnings

import torch
from torch import nn

import fsmap
from fsmap.integrations.ray import RayPool


def trial(seed: int) -> tuple[float, float]:
    """One data set: four strengths × two seeds as one computation, chosen by held-out error."""
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(80, 1, generator=g) - 2
    y = torch.sin(3 * x) + 0.3 * torch.randn(80, 1, generator=g)
    train, valid = fsmap.Batch(x[:40], y[:40]), fsmap.Batch(x[40:], y[40:])

    def build(reg_strength):
        terms = fsmap.Gaussian(0.3), fsmap.Normal(3.0), fsmap.px.Uniform(-2.0, 2.0)
        return fsmap.l_map(*terms, num_points=32, num_data=len(train.x), reg_strength=reg_strength)

    f, _ = fsmap.functional(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    grid = fsmap.Grid(reg_strength=[0.0, 1e-4, 1e-3, 1e-2], seed=[0, 1])
    options = {"optimizer": fsmap.train.optim.adam(0.05), "progress": False}
    states, _ = fsmap.fit_population(build, grid, f, train, steps=150, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fsmap.errors.EdgeOfGridWarning)
        best = fsmap.select(states, on=valid, by=fsmap.metrics.rmse, per=())
    return float(best.choices[0].config["reg_strength"]), float(best.choices[0].value)


def main() -> dict[int, float]:
    """Three data sets, as they end."""
    found = {}
    with RayPool(say=print) as pool:
        for number, value, error in pool.map(trial, [0, 1, 2]):
            if error is not None:
                raise error
            print(f"draw {number}: λ = {value[0]:g}, RMSE {value[1]:.3f}")
            found[number] = value[1]
    return found


if __name__ == "__main__":
    main()
