"""The rows of ``image-table`` as kinds of runs; figures take their PS-MAP and L-MAP from here."""

from __future__ import annotations

from fsmap.errors import InputError
from fsmap.experiments.image_config import BASELINES, ROWS, ImageConfig
from fsmap.experiments.image_protocol import BOTH, Kind

SMOOTHING = 0.05
"""Of the label-smoothing baseline."""

SAM_RADIUS = 0.05
"""ρ of sharpness-aware minimization, as its authors have it for CIFAR-10."""


def kind_of(config: ImageConfig, name: str) -> Kind:
    """A row of the table as a kind of run.

    Args:
        config: Sizes and the recipe.
        name: The row.

    Returns:
        The kind.

    Raises:
        InputError: If there is no such row.
    """
    if name == "ps-map":
        return Kind(name, "ps-map")
    if name == "label-smoothing":
        return Kind(name, name, changes={"label_smoothing": SMOOTHING})
    if name == "sam":
        return Kind(name, name, changes={"sam": SAM_RADIUS})
    if name == "recipe":
        return recipe(config)
    if name in ROWS:
        return Kind(name, px=name)
    message = f"no row {name!r}; there are {', '.join((*ROWS, 'recipe', *BASELINES))}"
    raise InputError(message)


def recipe(config: ImageConfig) -> Kind:
    """The recipe: D', and λ steered unless the config gives one."""
    changes = recipe_changes(config)
    if config.recipe_strength:
        changes["reg_strength"] = config.recipe_strength
    px, steer = recipe_px(config.recipe_batchnorm), not config.recipe_strength
    return Kind("recipe", px=px, steer=steer, changes=changes)


def recipe_px(mode: str) -> str:
    """Where R is taken: in ``joint`` its own batch adds the training images, else p_X has to.

    R at D' alone says little about the training images where the two have little in common:
    FashionMNIST with ``frozen`` brought R at KMNIST to a thousandth and stayed over-confident.

    Args:
        mode: Of BatchNorm.

    Returns:
        p_X of a :class:`Kind`.
    """
    return "other" if mode == "joint" else BOTH


def recipe_changes(config: ImageConfig) -> dict[str, object]:
    """What the recipe changes of the settings, apart from λ."""
    return {
        "estimator": config.recipe_estimator,
        "batchnorm": config.recipe_batchnorm,
        "num_points": min(config.recipe_points, config.points),
        "every": config.recipe_every,
    }
