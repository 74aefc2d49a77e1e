"""L-MAP in a scikit-learn pipeline: mixed columns, automatic strengths, compared on held-out rows.

Runs in seconds: python examples/sklearn_pipeline.py
"""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from fsmap.integrations.sklearn import LMAPClassifier

rng = np.random.default_rng(0)
people = pd.DataFrame(
    {
        "age": rng.uniform(18, 80, 500),
        "income": rng.lognormal(10, 0.5, 500),
        "town": rng.choice(["Bern", "Basel", "Chur"], 500),
    }
)
interest = 2 * np.sin(people.age / 8) * np.where(people.town == "Bern", 1, -0.5)
bought = np.where(rng.uniform(size=500) < 1 / (1 + np.exp(-3 * interest)), "yes", "no")
train_x, test_x, train_y, test_y = train_test_split(people, bought, random_state=0)

encode = make_column_transformer((OneHotEncoder(), ["town"]), remainder="passthrough")
models = {
    "logistic regression": LogisticRegression(max_iter=10_000),
    "PS-MAP": LMAPClassifier(method="ps-map", hidden=(32, 32), steps=300, random_state=0),
    "L-MAP": LMAPClassifier(method="l-map", hidden=(32, 32), steps=300, random_state=0),
}
for name, model in models.items():
    pipeline = make_pipeline(encode, model).fit(train_x, train_y)
    loss = log_loss(test_y, pipeline.predict_proba(test_x))
    print(f"{name:20}  accuracy {pipeline.score(test_x, test_y):.3f}  log loss {loss:.3f}")

chosen = models["L-MAP"]
print(f"chosen: weight decay {chosen.weight_decay_:g}, λ {chosen.reg_strength_:g}")
print(f"of {len(chosen.search_)} configurations, trained as one population")
