"""Write a model as an ONNX file, and compare what onnxruntime makes of it with what the model returns."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo.checkpoint.facts import describe_examples
from revzoo.errors import ConversionError, InputError, RevzooError
from revzoo.model.network import Model
from revzoo.spec.schema import TextInput

_TOLERANCE = 1e-3  # of the largest logit; float32 in another order of summation differs by about 1e-6


def export_onnx(model: Model, file: Path) -> float:
    """Write a model as an ONNX file for batches of any size; return how far its outputs are off, relative to the largest.

    Names of classes and preprocessing are in the file's metadata. Texts are padded to the model's length.

    Args:
        model: in eval mode, on the CPU.
        file: to write; its name ends in .onnx.
    Raises:
        InputError: another name, or the file's folder does not exist.
        ConversionError: the model cannot be exported, or onnxruntime computes something else; no file is left.
        RevzooError: a package is missing.
    """
    if file.suffix != ".onnx" or not file.parent.is_dir():
        raise InputError(
            f"A network is written as FILE.onnx, in a folder that exists. Received: {file}. Use --onnx network.onnx."
        )
    with _explain_missing():
        import_module("onnxscript")  # torch.onnx needs it, and does not say so in one sentence
        import onnxruntime
    example = _make_example(model, 2)
    with warnings.catch_warnings():  # of PyTorch and onnxscript, of themselves
        warnings.simplefilter("ignore")
        try:
            traced = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
            program: Any = torch.onnx.export(traced, dynamo=True, verbose=False)
        except Exception as error:  # the exporter raises many kinds
            reason = str(error).strip().partition("\n")[0]
            raise ConversionError(f"{model.spec.name} cannot be written as ONNX ({reason}).") from error
    program.model.metadata_props.update(describe_examples(model))
    program.save(str(file))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs = _make_example(model, 3)  # not the batch it was exported with
    with torch.inference_mode():
        expected = model(inputs)
    [result] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    difference = float((torch.from_numpy(result) - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE:  # nor NaN
        file.unlink()
        raise ConversionError(f"onnxruntime computes something else than {model.spec.name}: off by {difference:.1e}.")
    return difference


def _make_example(model: Model, size: int) -> Tensor:
    """Return a batch of random examples; the first of several texts is padded."""
    batch, input = model.example_input(size), model.spec.input
    if isinstance(input, TextInput) and input.padding is not None:
        batch[0, (input.length + 1) // 2 :] = input.padding
    return batch


@contextmanager
def _explain_missing() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise RevzooError(
            f"ONNX files need the package {error.name}. Install it: pip install onnx onnxscript onnxruntime"
        ) from error
