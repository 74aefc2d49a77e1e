"""Training image classifiers with PS-MAP and L-MAP: settings in, a resumable run out.

The interface, which is fixed::

    from fsmap.train.images import ImageSettings, ImageRun

    settings = ImageSettings(data="fmnist", method="l-map", px="kmnist", reg_strength=1e-6)
    run = ImageRun(settings, device="cuda", folder="runs/a", resume=True, hooks=[controller])
    rows = run.train(max_seconds=480)   # a row per epoch; stops early with a checkpoint
    run.done                            # else: the same two lines again go on

``ImageSettings`` is a frozen dataclass (``dataclasses.replace``). ``generated=True``,
``limit=256``, ``width=8`` make a run that takes seconds on a CPU and reads nothing.

A hook is a function ``on_epoch(run)``, or an object with ``on_epoch(run)`` and optionally
``on_step(run)``, ``state_dict()``, ``load_state_dict(state)`` (checkpointed: tensors, numbers,
text, lists). ``on_step`` is called after every step and should read nothing from the device unless
it must. What a hook can use:

- ``run.reg_strength``: λ, a plain number; set it at any time, the next step uses it (the captured
  graph reads it from a tensor). ``run.reg_strength_now`` includes the schedule. 0 switches R off.
- ``run.history[-1]``: the row of the epoch (``epoch step lr loss accuracy grad_norm laplacian
  reg_strength seconds valid_accuracy valid_nll valid_ece valid_temperature``); add entries to it in
  ``on_epoch`` and they are logged.
- ``run.glance()``: logits and labels of the held-out images in the precision of training, computed
  once a step however many hooks ask.
- ``run.look()``: the same with statistics of BatchNorm measured at the weights as they are; what
  controllers should look at, because running statistics lag behind at a high learning rate.
- ``run.logits("valid")`` (also ``"train"``, ``"test"``): logits and labels of the deployed model;
  ``run.logits_of(images)`` for other images, bytes or normalized numbers.
- ``run.snapshot()``, ``run.restore(snapshot)``: weights, statistics and momentum.
- ``run.step``, ``run.epoch``, ``run.steps``, ``run.steps_per_epoch``, ``run.lr``, ``run.done``,
  ``run.task`` (``train``, ``valid``, ``test``: ``Images(x, y)`` as bytes on the device, ``px``),
  ``run.module``, ``run.device``, ``run.group`` (``rank``, ``size``).

Held-out images (``task.valid``) are chosen by ``split_seed`` alone; ``valid=0`` holds out none.
Files in the folder: ``checkpoint.safetensors`` and ``log.jsonl`` (a line of circumstances, then
rows). ``load_model(folder)`` gives back the deployed model of a checkpoint and its progress
(``settings``, ``history``, ``step``).
"""

from fsmap.train.images.hooks import Hook
from fsmap.train.images.run import ImageRun
from fsmap.train.images.settings import ImageSettings
from fsmap.train.images.state import load_model

__all__ = ["Hook", "ImageRun", "ImageSettings", "load_model"]
