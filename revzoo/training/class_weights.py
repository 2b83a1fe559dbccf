"""How much each class counts in the loss."""

import torch
from torch import Tensor

from revzoo.data.base import Data
from revzoo.errors import SpecError, join_names
from revzoo.spec.parsing import to_plain
from revzoo.training.options import Recipe


def weigh_classes(recipe: Recipe, data: Data, outputs: int) -> Tensor | None:
    """Return the weight of every output, as `train.class_weights` says; None where it says nothing.

    Balanced weights are scikit-learn's: n / (k n_c) for the n_c of n examples that are of class c, of k classes. Over the
    training examples their mean is 1. Outputs without a class have the weight 1.

    Shapes: returns (outputs,).
    Raises:
        SpecError: the data have no classes, other ones than are weighted, or one of them has no example.
    """
    chosen = recipe.train.class_weights
    if chosen is None:
        return None
    classes, names = data.num_classes, data.class_names
    if classes is None or names is None:
        raise _refuse(recipe, "null for a language model, whose labels are not classes")
    if isinstance(chosen, tuple):
        if len(chosen) != classes:
            order = join_names(names)
            raise _refuse(recipe, f"a list of {classes} numbers, for the classes in this order: {order}; or balanced")
        weights = torch.tensor(chosen)
    else:
        if data.train_labels is None:
            raise _refuse(recipe, "a list of numbers: these data do not list their labels (attribute `targets`)")
        counts = torch.bincount(torch.as_tensor(data.train_labels), minlength=classes)
        if missing := [name for name, count in zip(names, counts.tolist(), strict=True) if count == 0]:
            raise _refuse(recipe, f"a list of numbers: there are no training examples of {join_names(missing)}")
        weights = counts.sum() / (classes * counts)
    return torch.cat([weights, torch.ones(outputs - classes)])


def _refuse(recipe: Recipe, allowed: str) -> SpecError:
    return recipe.error("train.class_weights", str(to_plain(recipe.train.class_weights)), allowed)
