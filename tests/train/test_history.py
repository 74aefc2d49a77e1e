"""History: columns, terms by step, thinning, and the story of a divergence."""

from __future__ import annotations

import pytest
import torch

from fsmap.errors import DivergedError
from fsmap.train.history import FLUSH_STEPS, Recorder, stop_if_diverged
from fsmap.train.step import COLUMNS

GOOD = [1.0, -2.0, -3.0, 4.0, 0.5]


def recorded(rows: list[list[float]], *, every: int = 1) -> tuple[Recorder, torch.Tensor]:
    recorder = Recorder(every=every)
    for step, row in enumerate(rows):
        recorder.add(step, 0.1, torch.tensor(row))
    return recorder, recorder.flush(last=True)


def test_columns_and_parts():
    recorder, _ = recorded([[s, -s, 2.0 * s, 3.0 * s, 1.0] for s in range(4)])
    history = recorder.history()
    assert history.loss.tolist() == [0, 1, 2, 3]
    assert history.columns["step"].tolist() == [0, 1, 2, 3]
    assert history.parts[-1] == {"likelihood": -3.0, "prior": 6.0, "geometry": 9.0}
    assert history.parts[1:3] == [history.parts[1], history.parts[2]]
    assert len(list(history.parts)) == 4
    assert repr(history) == "History(4 steps, 0 validations)"
    assert "likelihood, prior, geometry" in repr(history.parts)
    assert (history.columns["seconds"].diff() >= 0).all()


def test_thinning_keeps_every_kth_and_the_last():
    recorder, values = recorded([GOOD] * 8, every=3)
    assert recorder.history().columns["step"].tolist() == [0, 3, 6, 7]
    assert len(values) == 8  # what is looked at is not thinned


def test_a_population_has_one_column_per_member():
    recorder = Recorder(every=1)
    for step in range(3):
        recorder.add(step, 0.1, torch.arange(10.0).reshape(5, 2) + step)
    recorder.flush()
    recorder.validated(3, torch.tensor([0.5, 0.25]))
    history = recorder.history()
    assert history.loss.shape == (3, 2)
    assert history.parts[0]["prior"].tolist() == [4.0, 5.0]
    member = history.member(1)
    assert member.loss.tolist() == [1.0, 2.0, 3.0]
    assert member.validation["value"].tolist() == [0.25]
    assert member.columns["step"].tolist() == [0, 1, 2]


def test_it_asks_to_be_flushed_after_a_block():
    recorder = Recorder(every=1)
    for step in range(FLUSH_STEPS):
        assert not recorder.full()
        recorder.add(step, 0.1, torch.tensor(GOOD))
    assert recorder.full()


def test_a_recorder_goes_on_where_a_saved_history_stopped():
    first, _ = recorded([GOOD] * 3)
    saved = first.history()
    second = Recorder(every=1, saved=saved)
    second.add(3, 0.1, torch.tensor(GOOD))
    second.flush()
    seconds = second.history().columns["seconds"]
    assert second.history().columns["step"].tolist() == [0, 1, 2, 3]
    assert seconds[3] >= seconds[2] >= saved.columns["seconds"][-1]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("likelihood", r"step 2: the likelihood term is not finite.*clip the gradient"),
        ("prior", r"step 2: the prior term is not finite.*parameters themselves"),
        ("geometry", r"step 2: the geometry term is not finite.*raise jitter.*fsmap.doctor"),
        ("grad_norm", r"step 2: the gradient is not finite, while all terms are.*no derivative"),
        ("loss", r"step 2: the loss is not finite, while all terms are"),
    ],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_divergence_names_step_term_and_last_values(column: str, text: str, value: float):
    bad = list(GOOD)
    bad[COLUMNS.index(column)] = value
    recorder, values = recorded([GOOD, [9.0, 8.0, 7.0, 6.0, 5.0], bad, [torch.nan] * 5])
    with pytest.raises(DivergedError, match=text) as caught:
        stop_if_diverged(recorder, values)
    assert "loss 9, likelihood 8, prior 7, geometry 6, grad_norm 5" in str(caught.value)


def test_a_divergence_at_the_first_step_of_a_block_looks_further_back():
    recorder, values = recorded([GOOD])
    stop_if_diverged(recorder, values)
    recorder.add(1, 0.1, torch.full((5,), torch.nan))
    with pytest.raises(
        DivergedError, match=r"step 1: the likelihood, prior, geometry terms.*loss 1,"
    ):
        stop_if_diverged(recorder, recorder.flush())


def test_a_divergence_at_the_very_first_step():
    recorder, values = recorded([[torch.nan] * 5])
    with pytest.raises(DivergedError, match=r"step 0:.*there is no finite value before it"):
        stop_if_diverged(recorder, values)
