"""Load the data set that a recipe names, for a model's input."""

from revzoo.data.base import Data, Examples
from revzoo.data.options import TEXTS, DataOptions, is_own, require_root
from revzoo.errors import DataError
from revzoo.spec.schema import Input, TextInput


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
    if isinstance(options.batch_size, str):
        raise DataError(f"Only training chooses a batch size. Received: data.batch_size={options.batch_size}. Give a number.")
    require_root(options)
    if not is_own(options.name):
        _require_fitting_input(options.name, input)
    # Imported here, because each kind of data brings libraries that the others do not need.
    if is_own(options.name):
        from revzoo.data.own import load_own

        train, test = load_own(options, input, seed)
    elif isinstance(input, TextInput):
        from revzoo.data.text_examples import load_text

        train, test = load_text(options, input, seed)
    elif options.name == "digits":
        from revzoo.data.digits import load_digits

        train, test = load_digits(options, input, seed)
    else:
        from revzoo.data.images import load_images

        train, test = load_images(options, input, seed)
    count = min(len(train), options.limit or len(train))
    if processes and (most := count // processes) < options.batch_size:
        places = f" in each of {processes} processes" if processes > 1 else ""
        limited = f" of data.limit={options.limit}" if count < len(train) else ""
        raise DataError(
            f"The {count} training {train.noun}{limited} are too few for one batch{places}. Received: "
            f"data.batch_size={options.batch_size}. Use {f'data.batch_size={most} or less' if most else 'fewer processes'}."
        )
    return Data(train, test, options, seed, processes or 1)


def _require_fitting_input(name: str, input: Input) -> None:
    if isinstance(input, TextInput) != (name in TEXTS):
        kinds = ("images", "text") if isinstance(input, TextInput) else ("text", "images")
        fitting = " or ".join(TEXTS) if isinstance(input, TextInput) else "digits or folder"
        other = "rev_roberta_mini" if name in TEXTS else "rev_vit_digits"
        raise DataError(
            f"data.name={name} is {kinds[0]}. Received: a model for {kinds[1]}. Use data.name={fitting}, or a model for "
            f"{kinds[0]} such as model.name={other}."
        )
