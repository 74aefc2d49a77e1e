"""Images as uint8 tensors: reading, splitting, label noise, augmentation, evaluation sets."""

from fsmap.data.images.augment import Augmentation, Normalization, Shifts
from fsmap.data.images.evaluation import EvaluationSet, evaluation_set
from fsmap.data.images.read import Images, read_images
from fsmap.data.images.task import SETS, ImageTask, load_task

__all__ = [
    "SETS",
    "Augmentation",
    "EvaluationSet",
    "ImageTask",
    "Images",
    "Normalization",
    "Shifts",
    "evaluation_set",
    "load_task",
    "read_images",
]
