"""Assign the tensors of a file to the parameters of the converted network; for those left over, say why."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.original import Original
from revzoo.conversion.report import Action, TensorRow
from revzoo.conversion.sources.base import Source
from revzoo.conversion.sources.tensors import GridSize
from revzoo.errors import ConversionError, join_names
from revzoo.format import format_dtype
from revzoo.model.model import Model
from revzoo.spec.schema import ImageInput


@dataclass(frozen=True)
class Assignment:
    """Where every tensor of a file went.

    Args:
        rows: what was done with every tensor.
        values: tensors of the converted network, by key; without those that are initialised at random.
        interpolated: tensors of the original that were interpolated, by the original's key.
        unused: tensors of the original that the converted network has no place for and that `export` gives back.
    """

    rows: tuple[TensorRow, ...]
    values: dict[str, Tensor]
    interpolated: dict[str, Tensor]
    unused: dict[str, Tensor]


def assign(
    model: nn.Module,
    mappings: Sequence[TensorMapping],
    source: Source,
    original: Original,
    strict: bool,
    *,
    new_head: bool = False,
    replaced: Collection[str] = (),
) -> Assignment:
    """Compute the converted network's tensors from those of a file.

    Args:
        model: the converted network.
        mappings: of every tensor.
        original: its tensors are under the keys that the mappings use.
        strict: refuse missing and extra tensors; else missing ones are initialised at random, and extra ones are dropped.
        new_head: initialise tensors of the head at random where the file has none or one of another shape.
        replaced: keys of the original's own head, which are dropped unless the new one has them too.
    Raises:
        ConversionError: tensors are missing, extra, or of another shape or dtype, or contain values that are not finite.
    """
    tensors = original.tensors
    _check_values(tensors)
    _check_parameters(model, mappings, source, original)
    own, grid = model.state_dict(), _find_grid(model)
    rows, values, interpolated, misshapen = list[TensorRow](), dict[str, Tensor](), dict[str, Tensor](), list[str]()
    unused = {key: tensors[key] for mapping in mappings for key in mapping.theirs if not mapping.ours and key in tensors}
    for mapping in mappings:
        if not mapping.ours:
            continue
        ours = [own[key] for key in mapping.ours]
        expected = mapping.to_theirs(ours)
        row = TensorRow(mapping.ours, mapping.theirs, "initialised", _shapes(ours), _shapes(expected), (), mapping.transform)
        if absent := [key for key in mapping.theirs if key not in tensors]:
            rows.append(replace(row, note=f"{join_names(absent)} is missing"))
            continue
        if new_head and _is_of_head(mapping) and [tensors[key].shape for key in mapping.theirs] != [t.shape for t in expected]:
            rows.append(replace(row, note="the head has other outputs"))
            continue
        given = {key: tensors[key] for key in mapping.theirs}
        resized, misfits = _resize(given, expected, source, grid)
        interpolated |= resized
        misshapen += misfits
        if misshapen:  # an error follows, which lists all of them
            continue
        converted = mapping.to_ours([*(given | resized).values()])
        values |= dict(zip(mapping.ours, (t.contiguous() for t in converted), strict=True))
        action: Action = "interpolated" if resized else mapping.transform
        note = ", ".join(f"from {tuple(given[key].shape)} to {tuple(new.shape)}" for key, new in resized.items())
        dtypes = tuple(format_dtype(tensor.dtype) for tensor in given.values())
        rows.append(replace(row, action=action, original_dtypes=dtypes, note=note))
    used = {key for mapping in mappings for key in mapping.theirs}
    ignored = [key for key in tensors if key not in used and (source.ignores(key) or key in replaced)]
    extra = [key for key in tensors if key not in used and key not in ignored]
    rows += [TensorRow((), (key,), "dropped", note="constant, or not used here") for key in ignored]
    rows += [TensorRow((), (key,), "dropped", note="not part of the network") for key in extra]
    rows += [TensorRow((), (key,), "unused", note="kept for revzoo export alone") for key in unused]
    needed = [mapping for mapping in mappings if mapping.ours and not (new_head and _is_of_head(mapping))]
    missing = [key for mapping in needed for key in mapping.theirs if key not in tensors]
    problems = {"of another shape or kind": misshapen} | ({"missing": missing, "extra": extra} if strict else {})
    if any(problems.values()):
        raise _make_error(original, problems, used, {key for m in mappings if _is_of_head(m) for key in m.theirs})
    _check_share(len(values), sum(len(mapping.ours) for mapping in mappings))
    return Assignment(tuple(rows), values, interpolated, unused)


def _is_of_head(mapping: TensorMapping) -> bool:
    return all(key.startswith("head.") for key in mapping.ours)


def _find_grid(model: nn.Module) -> GridSize | None:
    """Return the rows and columns of tokens that a network makes of an image; None if it makes none."""
    embed = getattr(getattr(model, "stem", None), "patch_embed", None)
    if embed is None or not isinstance(model, Model) or not isinstance(model.spec.input, ImageInput):
        return None
    rows, columns = (side // stride for side, stride in zip(model.spec.input.size, embed.proj.stride, strict=True))
    return rows, columns


def _resize(
    given: Mapping[str, Tensor], expected: Sequence[Tensor], source: Source, grid: GridSize | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Interpolate tensors of another shape than expected; return these alone, and what is wrong with any others."""
    resized, misfits = dict[str, Tensor](), list[str]()
    for (key, tensor), like in zip(given.items(), expected, strict=True):
        if tensor.shape != like.shape:
            new = source.resize(key, tensor, tuple(like.shape), grid)
            if new is None or new.shape != like.shape:
                misfits.append(f"{key} {tuple(tensor.shape)} instead of {tuple(like.shape)}")
            else:
                resized[key] = new
        if tensor.is_floating_point() != like.is_floating_point():
            misfits.append(f"{key} of {tensor.dtype} instead of {like.dtype}")
    return resized, misfits


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _check_share(matching: int, count: int) -> None:
    """Raise ConversionError if fewer than half of the tensors match: then the file hardly belongs to this network."""
    if matching < count / 2:
        raise ConversionError(
            f"Only {matching} of {count} tensors match; at least half are needed. Is this checkpoint for another model?"
        )


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    if wrong := [key for key, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
        raise ConversionError(
            f"Values that are not finite are in {join_names(wrong)}. Use a checkpoint from before they appeared."
        )


def _check_parameters(model: nn.Module, mappings: Sequence[TensorMapping], source: Source, original: Original) -> None:
    """Raise ConversionError if the mappings lead to unknown parameters or leave some out, as for a parametrized original."""
    own = model.state_dict(keep_vars=True)
    mapped = {key for mapping in mappings for key in mapping.ours}
    unknown = [mapping.theirs[0] for mapping in mappings if not own.keys() >= set(mapping.ours)]
    tied = {id(t) for key, t in own.items() if key in mapped}  # a tied tensor is mapped under one of its keys
    unmapped = [key for key, t in own.items() if key not in mapped and id(t) not in tied]
    if unknown or unmapped:
        raise ConversionError(
            f"{original.name} has other parameters than a {source.name}: {join_names(unknown + unmapped)}. Undo what was done "
            "to its layers (torch.nn.utils.parametrize.remove_parametrizations, prune.remove) first."
        )


def _make_error(
    original: Original, problems: Mapping[str, Sequence[str]], expected: set[str], head: set[str]
) -> ConversionError:
    """Return the error that lists all problems.

    Args:
        expected: keys of all tensors that are needed.
        head: those of the head among them.
    """
    lines = [f"\n  {len(keys)} {what}: {join_names(list(keys), most=1000)}" for what, keys in problems.items() if keys]
    advice = "" if problems.get("of another shape or kind") else "\nGo on all the same with strict=False (--no-strict)."
    if problems.get("missing") and head >= set(problems["missing"]):
        advice = "\nThe head is missing: make a new one for N classes with num_outputs=N (--outputs N)." + advice
    return ConversionError(
        f"These are not the tensors of {original.name}, which has {len(expected)}; nothing was written.{''.join(lines)}{advice}"
    )
