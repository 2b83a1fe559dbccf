"""Giving every tensor its place, or saying of every one that has none why."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from revzoo.conversion.mapping import Entry
from revzoo.conversion.original import Original, nearest_original
from revzoo.conversion.report import Fate, Row
from revzoo.conversion.source import Source
from revzoo.errors import ConversionError, listing

_MOST = 40  # keys that a message lists of each kind


def assigned(
    model: nn.Module,
    entries: Sequence[Entry],
    source: Source,
    tensors: Mapping[str, Tensor],
    original: Original,
    partial: bool,
) -> tuple[tuple[Row, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Return what becomes of every tensor, our tensors, and those of theirs that were interpolated, so.

    Raises:
        ConversionError: tensors are missing, extra or of another shape.
    """
    own = model.state_dict()
    rows, values, missing, misshapen = list[Row](), dict[str, Tensor](), list[str](), list[str]()
    used, interpolated = set[str](), dict[str, Tensor]()
    for entry in entries:
        ours = [own[key] for key in entry.ours]
        shapes = tuple(tuple(t.shape) for t in ours)
        expected = None if entry.to_theirs is None else [tuple(t.shape) for t in entry.to_theirs(ours)]
        used.update(entry.theirs)
        if absent := [key for key in entry.theirs if key not in tensors]:
            missing += absent
            rows.append(Row(entry.ours, (), "initialised", shapes, note=f"{listing(absent)} is missing"))
            continue
        given, note = [tensors[key] for key in entry.theirs], ""
        how: Fate = entry.how
        for i, key in enumerate(entry.theirs):
            if expected is not None and tuple(given[i].shape) != expected[i]:
                fitted = source.resized(key, given[i], expected[i])
                if fitted is None or tuple(fitted.shape) != expected[i]:
                    misshapen.append(f"{key} {tuple(given[i].shape)} instead of {expected[i]}")
                else:
                    how, note = "interpolated", f"from {tuple(given[i].shape)} to {expected[i]}"
                    given[i] = interpolated[key] = fitted
        if misshapen:
            continue
        values |= dict(zip(entry.ours, (t.contiguous() for t in entry.to_ours(given)), strict=True))
        sources = tuple(tuple(t.shape) for t in given)
        rows.append(Row(entry.ours, entry.theirs, how, shapes, sources, note))
    ignored = [key for key in tensors if key not in used and source.ignored(key)]
    extra = [key for key in tensors if key not in used and key not in ignored]
    rows += [Row((), (key,), "dropped", note="a constant, or of no use here") for key in ignored]
    rows += [Row((), (key,), "dropped", note="it has no place") for key in extra]
    problems = {"of another shape": misshapen} | ({} if partial else {"missing": missing, "extra": extra})
    if any(problems.values()):
        raise _misfit(original, problems, len(used), tensors)
    placed = {key for entry in entries for key in entry.ours}
    shared = {id(t) for key, t in model.state_dict(keep_vars=True).items() if key in placed}
    forgotten = [key for key, t in model.state_dict(keep_vars=True).items() if key not in placed and id(t) not in shared]
    assert not forgotten, f"no entry for {forgotten}"
    return tuple(rows), values, interpolated


def _misfit(
    original: Original, problems: Mapping[str, Sequence[str]], count: int, tensors: Mapping[str, Tensor]
) -> ConversionError:
    lines = [f"\n  {len(keys)} {what}: {listing(list(keys), most=_MOST)}" for what, keys in problems.items() if keys]
    near = nearest_original(tensors)
    hint = f"\nThey look like those of {near!r}." if near else ""
    way = "" if problems.get("of another shape") else "\nGo on all the same with partial=True (--partial)."
    return ConversionError(
        f"These are not the tensors of {original.name}, which has {count}; nothing was written.{''.join(lines)}{hint}{way}"
    )
