"""A table: predictions with 90 % intervals from the scikit-learn estimator."""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from fsmap.integrations.sklearn import LMAPRegressor


def main():
    X, y = load_diabetes(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=100, random_state=0)
    model = LMAPRegressor(method="l-map", hidden=16, steps=100, random_state=0)
    model.fit(X_train, y_train)
    prediction = model.predict(X_test)
    low, high = model.predict_interval(X_test)
    covered = float(np.mean((low <= y_test) & (y_test <= high)))
    rmse = float(np.sqrt(np.mean((prediction - y_test) ** 2)))

    figure, ax = plt.subplots(figsize=(5, 3.8), layout="constrained")
    errors = np.stack([prediction - low, high - prediction])
    ax.errorbar(prediction, y_test, xerr=errors, fmt="o", ms=4, elinewidth=0.6, alpha=0.7)
    ax.plot([30, 330], [30, 330], "--", color="0.4", lw=1)
    ax.set(xlabel="prediction and 90 % interval", ylabel="progression of diabetes")
    ax.set_title(f"RMSE {rmse:.0f} (a constant: {np.std(y_test):.0f}), {covered:.0%} within")
    return figure, {"rmse": rmse, "constant": float(np.std(y_test)), "covered": covered}


if __name__ == "__main__":
    main()[0].savefig("table.svg")
