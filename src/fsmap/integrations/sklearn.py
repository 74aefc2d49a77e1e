"""The scikit-learn estimators, :mod:`fsmap.tables.sklearn`."""

from fsmap.tables.sklearn import LMAPClassifier as LMAPClassifier
from fsmap.tables.sklearn import LMAPRegressor as LMAPRegressor
