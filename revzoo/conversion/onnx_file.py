"""Write a model as an ONNX file, and compare what onnxruntime makes of it with what the model returns."""

import warnings
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from revzoo.checkpoint.facts import collect_facts
from revzoo.errors import ConversionError, InputError, explain_missing
from revzoo.model.model import Model
from revzoo.spec.schema import TextInput

_TOLERANCE = 1e-3  # of the largest logit; float32 in another order of summation differs by about 1e-6


def export_onnx(model: Model, file: Path) -> float:
    """Write a model as an ONNX file for batches of any size; return how far its outputs are off, relative to the largest.

    Names of classes and preprocessing are in the file's metadata. Texts are padded to the model's length. Weights of more than
    1.5 GB are in another file next to it.

    Args:
        model: in eval mode, on the CPU.
        file: to write; its name ends in .onnx.
    Raises:
        InputError: another name, or the file's folder does not exist.
        ConversionError: the model cannot be exported, or onnxruntime computes something else; nothing is written.
        RevzooError: a package is missing.
    """
    if file.suffix != ".onnx" or not file.parent.is_dir():
        raise InputError(
            f"A network is written as FILE.onnx, in a folder that exists. Received: {file}. Use --onnx network.onnx."
        )
    with explain_missing("onnxruntime", "ONNX files", install="onnx onnxscript onnxruntime"):
        import_module("onnxscript")  # torch.onnx needs it, and does not say so in one sentence
        import_module("onnxruntime")
    program = _trace(model)
    program.model.metadata_props.update(collect_facts(model))
    with TemporaryDirectory(dir=file.parent) as folder:
        program.save(str(Path(folder) / file.name))
        difference = _compare(model, Path(folder) / file.name)
        for written in sorted(Path(folder).iterdir(), key=lambda path: path.name == file.name):  # the file itself at last
            written.replace(file.parent / written.name)
    return difference


def _trace(model: Model) -> Any:
    """Return PyTorch's ONNX program of a model."""
    with warnings.catch_warnings():  # of PyTorch and onnxscript, of themselves
        warnings.simplefilter("ignore")
        try:
            shapes = ({0: torch.export.Dim("batch")},)
            traced = torch.export.export(model, (_make_example(model, 2),), dynamic_shapes=shapes)
            return torch.onnx.export(traced, dynamo=True, verbose=False)
        except Exception as error:  # the exporter raises many kinds
            raise ConversionError(f"{model.spec.name} cannot be written as ONNX ({_shorten(error)}).") from error


def _compare(model: Model, file: Path) -> float:
    """Return how far the outputs of a file are off, relative to the largest; ConversionError if that is too far."""
    import onnxruntime

    inputs = _make_example(model, 3)  # not the batch it was exported with
    with torch.inference_mode():
        expected = model(inputs)
    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        [result] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    except Exception as error:  # it has its own exceptions, which derive from nothing else
        raise ConversionError(f"onnxruntime cannot run {model.spec.name} ({_shorten(error)}).") from error
    difference = float((torch.from_numpy(result) - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE:  # nor NaN
        raise ConversionError(f"onnxruntime computes something else than {model.spec.name}: off by {difference:.1e}.")
    return difference


def _make_example(model: Model, size: int) -> Tensor:
    """Return a batch of random examples; the first of several texts is padded."""
    batch, input = model.example_input(size), model.spec.input
    if isinstance(input, TextInput) and input.padding is not None:
        batch[0, (input.length + 1) // 2 :] = input.padding
    return batch


def _shorten(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
