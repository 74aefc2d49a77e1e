"""``fsmap train``: a run of seconds, resumed, refused, and under torchrun with a process killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from fsmap.cli import main
from fsmap.cli.train import LOCK
from fsmap.files import exclusive
from fsmap.images import load_model
from fsmap.images.build import FILE

MODEL = "image_cases:TinyNet"
TINY = [
    *("train", "--data", "fmnist", "--generated", "--limit", "64", "--valid", "32"),
    *("--model", MODEL, "--batch-size", "16", "--num-points", "8"),
    *("--px", "kmnist", "--reg-strength", "1e-3", "--silent", "--device", "cpu"),
]
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("float32")


def test_a_run(tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*TINY, "--epochs", "2", "--out", str(out), "--batchnorm", "frozen"]) == 0
    said = capsys.readouterr().out
    assert "fmnist (generated images): 64 training, 32 held-out, 64 test images" in said
    assert "l-map, λ 0.001, p_X = kmnist, jvp, frozen, S = 8, every = 1\n" in said
    assert "2 epochs in batches of 16, learning rate 0.1, weight decay 0.0005, seed 0\n" in said
    assert "after temperature scaling" in said
    head, *rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert head["settings"]["batchnorm"] == "frozen"
    assert "commit" in head
    assert [row["epoch"] for row in rows] == [1, 2]
    assert load_model(out, model=MODEL)[1]["settings"].reg_strength == 1e-3
    nats = [word for word in TINY if word not in ("--reg-strength", "1e-3")]
    assert main([*nats, "--epochs", "1", "--out", str(tmp_path / "nats")]) == 0
    assert "0.05 nats" in capsys.readouterr().out
    assert main([*TINY, "--method", "ps-map"]) == 2
    assert "not of ps-map" in capsys.readouterr().err


def test_a_temperature_at_its_bound_is_no_result(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fsmap.metrics.temperature", lambda *_: 100.0)
    assert main([*TINY, "--epochs", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no temperature (T 100 is a bound of the search and means nothing)" in said
    assert "after temperature scaling" not in said


def test_the_opening_names_the_baselines(tmp_path, capsys):
    plain = [word for word in TINY if word not in ("--reg-strength", "1e-3")]
    others = ["--sam", "0.05", "--label-smoothing", "0.1", "--label-noise", "0.2"]
    where = ["--epochs", "1", "--method", "ps-map", "--out", str(tmp_path)]
    assert main([*plain, *others, *where]) == 0
    assert "ps-map, SAM 0.05, label smoothing 0.1, label noise 0.2\n" in capsys.readouterr().out


def test_options_of_r_without_r_are_noted(tmp_path, capsys):
    plain = [word for word in TINY if word not in ("--reg-strength", "1e-3")]
    words = [*plain, "--epochs", "1", "--every", "3", "--out"]
    for method, says in (("ps-map", True), ("l-map", False)):
        assert main([*words, str(tmp_path / method), "--method", method]) == 0
        noted = "no effect with ps-map, which has no R: --px, --num-points, --every"
        assert (noted in capsys.readouterr().err) == says


def test_in_pieces(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--epochs", "2", "--seeds", "0,1"]
    assert main([*TINY, *out, "--max-seconds", "0"]) == 3
    assert "time is up. The last checkpoint is" in capsys.readouterr().out
    assert main([*TINY, *out]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*TINY, *out, "--resume"]) == 0
    steps = [load_model(tmp_path / f"seed{s}", model=MODEL)[1]["step"] for s in (0, 1)]
    assert steps == [8, 8]


def test_missing_data_says_how_to_get_it(no_data, capsys):
    assert main(["train", "--data", "cifar10", "--device", "cpu"]) == 2
    assert "Get it with: fsmap data get cifar10" in capsys.readouterr().err


def start(words: list[str], out: Path, processes: int = 1) -> subprocess.Popen[str]:
    launch = [
        *("torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m"),
    ]
    many = launch if processes > 1 else []
    command = [sys.executable, "-m", *many, "fsmap", *words, "--out", str(out)]
    paths = f"{TESTS}:{TESTS.parent / 'src'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for(job: subprocess.Popen[str], file: Path, lines: int = 0) -> None:
    began = time.monotonic()
    while not (file.exists() and (not lines or len(file.read_text().splitlines()) >= lines)):
        assert time.monotonic() - began < 90, job.communicate()
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_a_killed_process_ends_the_job_which_resumes(tmp_path):
    words = [*TINY, "--epochs", "40", "--checkpoint-every", "4"]
    job = start(words, tmp_path, processes=2)
    wait_for(job, tmp_path / FILE)
    workers = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "the same command with --resume goes on from it" in errors
    assert "lost the others" in errors or "asked to terminate" in errors
    assert 4 <= load_model(tmp_path, model=MODEL)[1]["step"] < 160
    with pytest.warns(UserWarning, match="processes"):
        assert main([*words, "--out", str(tmp_path), "--resume"]) == 0
    assert load_model(tmp_path, model=MODEL)[1]["step"] == 160


def test_several_seeds_beside_a_single_run(tmp_path, capsys):
    words = [*TINY, "--epochs", "1", "--silent", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert main([*words, "--seeds", "0,1", "--resume"]) == 2
    assert "holds a single run; those of several seeds go into folders" in capsys.readouterr().err


@pytest.mark.parametrize(("images", "size"), [(7, 2), (64, 16), (127, 16), (128, 128)])
def test_the_batch_size_fits_a_small_set(tmp_path, capsys, images, size):
    few = [*TINY, "--limit", str(images), "--epochs", "1", "--out", str(tmp_path)]
    at = few.index("--batch-size")
    words = few[:at] + few[at + 2 :]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"in batches of {size}," in said
    fewer = f"fewer training images than 128: --batch-size {size}"
    assert (fewer in said) == (size < 128)
    assert main([*words, "--resume"]) == 0
    assert main([*words, "--resume", "--batch-size", str(size)]) == 0
    assert main([*words, "--resume", "--batch-size", "129"]) == 2
    assert "batch_size=129 is larger than the training set" in capsys.readouterr().err


def test_the_default_folder_of_the_current_folder_has_its_name(tmp_path, monkeypatch):
    for i in range(12):
        (tmp_path / "photos" / f"{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 12), i).save(tmp_path / "photos" / f"{i % 2}" / f"{i}.png")
    monkeypatch.chdir(tmp_path / "photos")
    small = ["--epochs", "1", "--method", "ps-map", "--width", "1"]
    assert main(["train", "--data", ".", *small, "--silent", "--device", "cpu"]) == 0
    assert Path("runs/train/photos-ps-map-seed0").is_dir()


def test_the_default_folder_needs_no_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixed = ["--px", "0.8*train+0.2*white-noise", "--silent"]
    assert main([*TINY, "--epochs", "1", *mixed]) == 0
    (folder,) = (tmp_path / "runs" / "train").iterdir()
    assert folder.name.endswith("-l-map-0.8train-0.2white-noise-reg_strength-0.001-generated-seed0")
    assert main([*TINY, "--epochs", "1", *mixed, "--quick"]) == 0  # is not in the way of it
    assert folder.with_name(
        "fmnist-l-map-0.8train-0.2white-noise-reg_strength-0.001-quick-seed0"
    ).is_dir()
    (tmp_path / "own" / "all").mkdir(parents=True)
    for i in range(2):
        Image.new("L", (30, 28)).save(tmp_path / "own" / "all" / f"{i}.png")
    assert main([*TINY, "--epochs", "1", "--px", "./own?size=28", "--silent"]) == 0
    assert folder.with_name(
        "fmnist-l-map-.-own-size-28-reg_strength-0.001-generated-seed0"
    ).is_dir()


def test_methods_have_default_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = [word for word in TINY if word not in ("--reg-strength", "1e-3", "--px", "kmnist")]
    names = {
        "l-map-train": "--reg-nats 0.05 --weight-decay 5e-4",
        "l-map-train-reg_nats-0.1": "--reg-nats 0.1",
        "l-map-train-reg_strength-1e-06": "--reg-strength 1e-6",
        "l-map-train-sam-0.05": "--sam 0.05",
        "ps-map": "--method ps-map --sam 0",
        "ps-map-label_smoothing-0.1-label_noise-0.2": "--method ps-map --label-smoothing 0.1 "
        "--label-noise 0.2",
        "ps-map-weight_decay-0": "--method ps-map --weight-decay 0",
    }
    for words in names.values():
        assert main([*plain, "--epochs", "1", *words.split()]) == 0
    there = {path.name for path in (tmp_path / "runs" / "train").iterdir()}
    assert there == {f"fmnist-{name}-generated-seed0" for name in names}


def test_a_quick_run_replaces_the_one_before_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = [*TINY, "--quick", "--epochs"]
    for epochs in ("2", "1"):
        assert main([*quick, epochs]) == 0
    (folder,) = (tmp_path / "runs" / "train").iterdir()
    assert load_model(folder, model=MODEL)[1]["settings"].epochs == 1
    assert main([*quick, "1", "--resume"]) == 0
    assert "from step 4 of 4" in capsys.readouterr().out
    assert main([*quick, "1", "--out", str(folder)]) == 2  # it could be a long run


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [(signal.SIGINT, 130, "interrupted."), (signal.SIGTERM, 143, "asked to terminate (SIGTERM).")],
)
def test_ctrl_c_ends_a_run_with_a_checkpoint(tmp_path, kind, code, words):
    job = start([*TINY, "--epochs", "100000"], tmp_path)
    wait_for(job, tmp_path / "log.jsonl", lines=2)
    job.send_signal(kind)
    out, errors = job.communicate(timeout=60)
    assert job.returncode == code
    assert f"{words} The last checkpoint is" in out + errors
    assert "stopping after this step" in errors
    assert load_model(tmp_path, model=MODEL)[1]["step"] >= 4


def test_two_processes_do_not_write_one_folder(tmp_path, capsys):
    with exclusive(tmp_path / LOCK, tmp_path):
        assert main([*TINY, "--epochs", "1", "--out", str(tmp_path)]) == 2
    assert "another process is writing to" in capsys.readouterr().err
    assert main([*TINY, "--epochs", "1", "--out", str(tmp_path)]) == 0


def test_all_processes_stop_when_time_is_up(tmp_path):
    """And the exit code says so: the documented loop goes on."""
    words = [*TINY, "--epochs", "60", "--seeds", "0,1", "--max-seconds", "1"]
    out, errors = start(words, tmp_path, processes=2).communicate(timeout=120)
    assert "time is up" in out
    assert "lost the others" not in errors
    assert (tmp_path / "seed0" / FILE).exists()
    assert not (tmp_path / "seed1").exists()
