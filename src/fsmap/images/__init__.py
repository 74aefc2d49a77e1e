"""Training image classifiers with PS-MAP and L-MAP: settings in, a resumable run out.

    run = ImageRun(ImageSettings(px="kmnist"), device="cuda", folder="runs/a", resume=True)
    rows = run.train(max_seconds=480)  # a row per epoch; if not run.done, the same lines go on

A hook is a function ``on_epoch(run)``, or an object with ``on_epoch(run)`` and optionally
``on_step(run)``. It can use ``run.reg_strength`` (set it, the next step uses it),
``run.history[-1]`` (the row of the epoch; add entries to it), ``run.logits("valid")`` (also
``"train"``, ``"test"``), ``run.step``, ``run.epoch``, ``run.task``, ``run.module``, ``run.device``.

Files in the folder: ``checkpoint.safetensors`` and ``log.jsonl`` (settings and versions, then a
line per epoch). ``load_model(folder)`` returns the model of a checkpoint and its progress.
"""

from fsmap.images.build import ImageSettings, load_model
from fsmap.images.run import ImageRun

__all__ = ["ImageRun", "ImageSettings", "load_model"]
