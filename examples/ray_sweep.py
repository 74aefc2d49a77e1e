"""A sweep on Ray: every trial is a population, that is a grid of strengths trained as one.

Trials are splits of one table. Without an address Ray starts on this machine; `RayPool("auto")` or
`RayPool("head:6379")` uses a cluster. A worker that dies costs the trial it ran, which is repeated.
Prints, for every split, the test error with the λ that was best on its held-out rows.
"""

import numpy as np

from fsmap.integrations.ray import RayPool


def trial(seed: int) -> tuple[float, float]:
    """One split: choose λ by one population on held-out rows, test once."""
    from fsmap.integrations.sklearn import LMAPRegressor

    rng = np.random.default_rng(seed)
    X = rng.normal(size=(300, 3))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=300)
    model = LMAPRegressor(hidden=(32, 32), steps=300, weight_decay=1e-4, random_state=seed)
    model.fit(X[:200], y[:200])
    error = model.predict(X[200:]) - np.sin(2 * X[200:, 0])
    return model.reg_strength_, float(np.sqrt(np.mean(error**2)))


def main() -> dict[int, float]:
    """Three splits, as they end."""
    found = {}
    with RayPool(say=print) as pool:
        for index, value, error, attempts in pool.map(trial, [0, 1, 2]):
            if error is not None:
                raise error
            print(f"split {index}: λ = {value[0]:.1e}, RMSE {value[1]:.3f}, {attempts} attempt(s)")
            found[index] = value[1]
    return found


if __name__ == "__main__":
    main()
