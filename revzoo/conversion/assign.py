"""Giving every tensor its place, or saying of every one that has none why."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from revzoo.conversion.mapping import Entry
from revzoo.conversion.original import Original, nearest_original
from revzoo.conversion.report import Fate, Row
from revzoo.conversion.sources.base import Source
from revzoo.errors import ConversionError, listing

_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers?|layer\d)\.(\d+)\.")


def assigned(
    model: nn.Module,
    entries: Sequence[Entry],
    source: Source,
    tensors: Mapping[str, Tensor],
    original: Original,
    partial: bool,
) -> tuple[tuple[Row, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Return what becomes of every tensor, our tensors, and those of theirs that were interpolated, so.

    Args:
        model: of the converted network, on the meta device.
        entries: where every tensor goes.
        tensors: of the file, under the names that the entries have.
        partial: begin missing tensors fresh, and drop extra ones.
    Raises:
        ConversionError: tensors are missing, extra, of another shape, or hold what is no number.
    """
    if wrong := [key for key, t in tensors.items() if t.layout != torch.strided or t.is_meta or t.is_quantized]:
        raise ConversionError(f"Sparse, quantized or without values are {listing(wrong)}. Save them as ordinary tensors.")
    if wrong := [key for key, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()]:
        raise ConversionError(f"Values that are not finite are in {listing(wrong)}. Take a checkpoint from before that.")
    own = model.state_dict()
    placed = {key for entry in entries for key in entry.ours}
    shared = {id(t) for key, t in model.state_dict(keep_vars=True).items() if key in placed}
    forgotten = [key for key, t in model.state_dict(keep_vars=True).items() if key not in placed and id(t) not in shared]
    if strange := [entry.theirs[0] for entry in entries if not own.keys() >= set(entry.ours)] + forgotten:
        raise ConversionError(
            f"{original.name} has other parameters than a {source.name}: {listing(strange)}. Undo what was done to its layers "
            "(torch.nn.utils.parametrize.remove_parametrizations, prune.remove) first."
        )
    rows, values, missing, misshapen = list[Row](), dict[str, Tensor](), list[str](), list[str]()
    used, interpolated = set[str](), dict[str, Tensor]()
    for entry in entries:
        ours = [own[key] for key in entry.ours]
        shapes = tuple(tuple(t.shape) for t in ours)
        expected = tuple(tuple(t.shape) for t in entry.to_theirs(ours))
        used.update(entry.theirs)
        if absent := [key for key in entry.theirs if key not in tensors]:
            missing += absent
            note = f"{listing(absent)} is missing"
            rows.append(Row(entry.ours, entry.theirs, "initialised", shapes, expected, way=entry.how, note=note))
            continue
        given, note = [tensors[key] for key in entry.theirs], ""
        how: Fate = entry.how
        for i, key in enumerate(entry.theirs):
            if tuple(given[i].shape) != expected[i]:
                fitted = source.resized(key, given[i], expected[i])
                if fitted is None or tuple(fitted.shape) != expected[i]:
                    misshapen.append(f"{key} {tuple(given[i].shape)} instead of {expected[i]}")
                else:
                    how, note = "interpolated", f"from {tuple(given[i].shape)} to {expected[i]}"
                    given[i] = interpolated[key] = fitted
            if given[i].is_floating_point() != ours[0].is_floating_point():
                misshapen.append(f"{key} of {given[i].dtype} instead of {ours[0].dtype}")
        if misshapen:
            continue
        values |= dict(zip(entry.ours, (t.contiguous() for t in entry.to_ours(given)), strict=True))
        dtypes = tuple(str(tensors[key].dtype).removeprefix("torch.") for key in entry.theirs)
        rows.append(Row(entry.ours, entry.theirs, how, shapes, expected, dtypes, entry.how, note))
    ignored = [key for key in tensors if key not in used and source.ignored(key)]
    extra = [key for key in tensors if key not in used and key not in ignored]
    rows += [Row((), (key,), "dropped", note="a constant, or of no use here") for key in ignored]
    rows += [Row((), (key,), "dropped", note="it has no place") for key in extra]
    problems = {"of another shape or kind": misshapen} | ({} if partial else {"missing": missing, "extra": extra})
    if any(problems.values()):
        raise _misfit(original, problems, used, tensors)
    if len(values) < len(placed) / 2:
        raise ConversionError(f"Of {len(placed)} tensors only {len(values)} are in the file: that is not a start.")
    return tuple(rows), values, interpolated


def _misfit(
    original: Original, problems: Mapping[str, Sequence[str]], own: set[str], tensors: Mapping[str, Tensor]
) -> ConversionError:
    lines = [f"\n  {len(keys)} {what}: {listing(list(keys), most=1000)}" for what, keys in problems.items() if keys]
    wrong = sum(len(keys) for what, keys in problems.items() if what != "extra")
    near = nearest_original(tensors) if wrong > len(own) / 2 else ""
    hint = f"\nThey look like those of {near!r}." if near else ""
    theirs, ours = (len({found[0] for key in keys for found in [_BLOCK.findall(key)] if found}) for keys in (tensors, own))
    hint += f"\nThe file has {theirs} blocks in a row, the network {ours}." if theirs != ours else ""
    way = "" if problems.get("of another shape or kind") else "\nGo on all the same with partial=True (--partial)."
    return ConversionError(
        f"These are not the tensors of {original.name}, which has {len(own)}; nothing was written.{''.join(lines)}{hint}{way}"
    )
