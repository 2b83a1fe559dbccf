"""Load the data set that a recipe names, for a model's input."""

import os

from revzoo.data.base import Data, Examples
from revzoo.data.options import BUNDLED, TABLES, TEXTS, DataOptions, is_own
from revzoo.errors import DataError, quote
from revzoo.spec.names import find_beside
from revzoo.spec.schema import ImageInput, Input, TextInput


def load_data(options: DataOptions, input: Input, seed: int, processes: int = 1) -> Data:
    """Load training and test data for a model's input.

    Args:
        options: the `data` section of a recipe.
        input: what the model takes, from its spec: images of a size, or ids of a vocabulary.
        seed: determines order and augmentation.
        processes: number of training processes that share every epoch; 0 if the data are only evaluated on.

    Raises:
        DataError: the data are missing, empty, without classes, not what the model takes, or fewer than a batch for each
            process.
    """
    train: Examples
    test: Examples
    if not is_own(options.name):
        _require_fitting_input(options.name, input)
        if options.name not in BUNDLED and not os.path.isdir(root := options.root or ""):
            raise _explain_missing(root)
    # Imported here, because each kind of data brings libraries that the others do not need.
    if is_own(options.name):
        from revzoo.data.own import load_own

        train, test = load_own(options, input, seed)
    elif isinstance(input, TextInput):
        from revzoo.data.text import load_text

        train, test = load_text(options, input, seed)
    elif options.name == "digits":
        from revzoo.data.digits import load_digits

        train, test = load_digits(options, input, seed)
    else:
        from revzoo.data.images import load_images

        train, test = load_images(options, input, seed)
    if processes and (most := len(train) // processes) < options.batch_size:
        places = f" in each of {processes} processes" if processes > 1 else ""
        raise DataError(
            f"The {len(train)} training {train.noun} are too few for one batch{places}. Received: "
            f"data.batch_size={options.batch_size}. Use {f'data.batch_size={most} or less' if most else 'fewer processes'}."
        )
    return Data(train, test, options, seed, processes or 1)


def _explain_missing(root: str) -> DataError:
    """Return the error for a folder of images that is none."""
    if not os.path.isfile(root):
        return DataError(f"There is no folder {root[:300]}.{find_beside(root)} Set data.root to where the data are.")
    texts = (
        f" Texts are trained on by revzoo train texts {quote(f'data.root={root}')}."
        if root.lower().endswith(tuple(TABLES))
        else ""
    )
    return DataError(f"{root} is a file, and data.root is a folder with one folder of images per class.{texts}")


def _require_fitting_input(name: str, input: Input) -> None:
    if isinstance(input, TextInput) and name not in (*TEXTS, "hfds"):
        fitting = f"data.name={' or '.join(TEXTS)} or hfds, or a model for images such as model.name=rev_vit_digits"
        raise DataError(f"data.name={name} is images. Received: a model for text. Use {fitting}.")
    if isinstance(input, ImageInput) and name in TEXTS:
        fitting = "data.name=digits or folder, or a model for text such as model.name=rev_roberta_mini"
        raise DataError(f"data.name={name} is text. Received: a model for images. Use {fitting}.")
