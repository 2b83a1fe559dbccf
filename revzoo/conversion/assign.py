"""Assign the tensors of a file to the parameters of the converted network; for those left over, say why."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.original import Original, find_nearest_name
from revzoo.conversion.report import Action, TensorRow
from revzoo.conversion.sources.base import Source
from revzoo.errors import ConversionError, listing

_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers?|layer\d)\.(\d+)\.")


@dataclass(frozen=True)
class Assignment:
    """Where every tensor of a file went.

    Args:
        rows: what was done with every tensor.
        values: tensors of the converted network, by key; without those that begin fresh.
        interpolated: tensors of the source that were interpolated, by the source's key.
    """

    rows: tuple[TensorRow, ...]
    values: dict[str, Tensor]
    interpolated: dict[str, Tensor]


def assign(
    model: nn.Module,
    mappings: Sequence[TensorMapping],
    source: Source,
    tensors: Mapping[str, Tensor],
    original: Original,
    strict: bool,
) -> Assignment:
    """Compute the converted network's tensors from those of a file.

    Args:
        model: the converted network, on the meta device.
        mappings: of every tensor.
        tensors: of the file, under the keys that the mappings use.
        strict: refuse missing and extra tensors; else missing ones begin fresh, and extra ones are dropped.
    Raises:
        ConversionError: tensors are missing, extra, or of another shape or dtype, or contain values that are not finite.
    """
    _check_values(tensors)
    own = model.state_dict()
    _check_parameters(model, mappings, source, original)
    rows, values, missing, misshapen = list[TensorRow](), dict[str, Tensor](), list[str](), list[str]()
    used, interpolated = set[str](), dict[str, Tensor]()
    for mapping in mappings:
        ours = [own[key] for key in mapping.ours]
        shapes = tuple(tuple(t.shape) for t in ours)
        expected = tuple(tuple(t.shape) for t in mapping.to_theirs(ours))
        used.update(mapping.theirs)
        if absent := [key for key in mapping.theirs if key not in tensors]:
            missing += absent
            note = f"{listing(absent)} is missing"
            rows.append(TensorRow(mapping.ours, mapping.theirs, "initialised", shapes, expected, (), mapping.transform, note))
            continue
        given, note = [tensors[key] for key in mapping.theirs], ""
        action: Action = mapping.transform
        for i, key in enumerate(mapping.theirs):
            if tuple(given[i].shape) != expected[i]:
                resized = source.resize(key, given[i], expected[i])
                if resized is None or tuple(resized.shape) != expected[i]:
                    misshapen.append(f"{key} {tuple(given[i].shape)} instead of {expected[i]}")
                else:
                    action, note = "interpolated", f"from {tuple(given[i].shape)} to {expected[i]}"
                    given[i] = interpolated[key] = resized
            if given[i].is_floating_point() != ours[0].is_floating_point():
                misshapen.append(f"{key} of {given[i].dtype} instead of {ours[0].dtype}")
        if misshapen:
            continue
        values |= dict(zip(mapping.ours, (t.contiguous() for t in mapping.to_ours(given)), strict=True))
        dtypes = tuple(str(tensors[key].dtype).removeprefix("torch.") for key in mapping.theirs)
        rows.append(TensorRow(mapping.ours, mapping.theirs, action, shapes, expected, dtypes, mapping.transform, note))
    ignored = [key for key in tensors if key not in used and source.ignores(key)]
    extra = [key for key in tensors if key not in used and key not in ignored]
    rows += [TensorRow((), (key,), "dropped", note="constant, or not used here") for key in ignored]
    rows += [TensorRow((), (key,), "dropped", note="not part of the network") for key in extra]
    problems = {"of another shape or kind": misshapen} | ({"missing": missing, "extra": extra} if strict else {})
    if any(problems.values()):
        raise _make_error(original, problems, used, tensors)
    count = sum(len(mapping.ours) for mapping in mappings)
    if len(values) < count / 2:  # with fewer the file hardly belongs to this network
        raise ConversionError(
            f"Only {len(values)} of {count} tensors match; at least half are needed. Is this checkpoint for another model?"
        )
    return Assignment(tuple(rows), values, interpolated)


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    if wrong := [key for key, t in tensors.items() if t.layout != torch.strided or t.is_meta or t.is_quantized]:
        raise ConversionError(
            f"Tensors that are sparse, quantized or without values cannot be converted. Received: {listing(wrong)}. Save "
            "them as ordinary tensors."
        )
    if wrong := [key for key, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
        raise ConversionError(
            f"Values that are not finite are in {listing(wrong)}. Use a checkpoint from before they appeared."
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
            f"{original.name} has other parameters than a {source.name}: {listing(unknown + unmapped)}. Undo what was done to "
            "its layers (torch.nn.utils.parametrize.remove_parametrizations, prune.remove) first."
        )


def _make_error(
    original: Original, problems: Mapping[str, Sequence[str]], expected: set[str], tensors: Mapping[str, Tensor]
) -> ConversionError:
    """Return the error that lists all problems, and the network that the tensors look like."""
    lines = [f"\n  {len(keys)} {what}: {listing(list(keys), most=1000)}" for what, keys in problems.items() if keys]
    wrong = sum(len(keys) for what, keys in problems.items() if what != "extra")
    nearest = find_nearest_name(tensors) if wrong > len(expected) / 2 else ""
    hint = f"\nThey look like those of {nearest!r}." if nearest else ""
    theirs, ours = _count_blocks(tensors), _count_blocks(expected)
    hint += f"\nThe file has {theirs} blocks in a row, the network {ours}." if theirs != ours else ""
    advice = "" if problems.get("of another shape or kind") else "\nGo on all the same with strict=False (--no-strict)."
    return ConversionError(
        f"These are not the tensors of {original.name}, which has {len(expected)}; nothing was written."
        f"{''.join(lines)}{hint}{advice}"
    )


def _count_blocks(keys: Iterable[str]) -> int:
    """Return how many different block numbers the keys contain."""
    return len({match[1] for key in keys if (match := _BLOCK.search(key))})
