"""Where the networks of the image experiments are."""

from __future__ import annotations

from pathlib import Path

import torch

from fsmap.paper.experiment import Context
from fsmap.paper.images import protocol as protocol
from fsmap.paper.run_folder import Place


def folder_of(out: Path) -> Path:
    return protocol._folder(Context(torch.device("cpu"), out), "fmnist-ps-map-0-digest")


def finish(out: Path) -> Path:
    folder = out / "models" / "fmnist-ps-map-0-digest"
    folder.mkdir(parents=True)
    (folder / protocol.DONE).touch()
    return folder


def test_a_network_that_another_experiment_has_trained_is_taken_from_there(tmp_path: Path):
    there = finish(tmp_path / "image-table")
    assert folder_of(tmp_path / "shift") == there
    assert folder_of(Place.of(tmp_path, "shift").fresh.path) == there
    mine = finish(tmp_path / "shift")
    assert folder_of(tmp_path / "shift") == mine


def test_a_run_that_starts_anew_takes_nothing_from_the_one_it_replaces(tmp_path: Path):
    """That one is kept aside when the new one is finished, and goes with the next replacement."""
    place = Place.of(tmp_path, "image-table")
    finish(place.final.path)
    mine = place.fresh.path / "models" / "fmnist-ps-map-0-digest"
    assert folder_of(place.fresh.path) == mine
    there = finish(tmp_path / "shift")
    assert folder_of(place.fresh.path) == there
    assert folder_of(place.final.path) == place.final.path / "models" / mine.name
