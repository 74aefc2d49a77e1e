"""The knobs that both loops share. (Refusals are tested through ``fit``.)"""

from __future__ import annotations

import json

from fsmap.train.loop import Settings
from fsmap.train.optim import adam, constant, cosine, warmup


def test_the_number_of_steps_counts_where_the_learning_rate_depends_on_it():
    for schedule, counts in ((constant(), False), (warmup(5), False), (cosine(), True)):
        short, long = (Settings(n, adam(0.1), schedule).describe() for n in (10, 20))
        assert (short != long) == counts


def test_the_description_is_plain_and_shows_every_knob():
    base = Settings(10, adam(0.1), constant())
    described = base.describe()
    json.dumps(described)
    others = [
        Settings(10, adam(0.2), constant()),
        Settings(10, adam(0.1, betas=(0.5, 0.9)), constant()),
        Settings(10, adam(0.1), warmup(3)),
        Settings(10, adam(0.1), constant(), clip=1.0),
        Settings(10, adam(0.1), constant(), log_every=2),
        Settings(10, adam(0.1), constant(), validation=lambda p: 0.0),
        Settings(10, adam(0.1), constant(), validation=lambda p: 0.0, patience=2),
    ]
    seen = [json.dumps(o.describe()) for o in others]
    assert len(set(seen)) == len(seen)
    assert json.dumps(described) not in seen
