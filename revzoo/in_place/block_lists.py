"""The lists of blocks in a network: which of their blocks can be the steps of chains, and why others cannot."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from revzoo.analysis.chains import find_chains
from revzoo.analysis.dry_run import require_module
from revzoo.block_steps.block_chain import get_step
from revzoo.errors import ConversionError, InputError, UnknownNameError, join_names
from revzoo.in_place.survey import BlockSurvey
from revzoo.runtime.compiling import are_compiled
from revzoo.runtime.replaced_call import is_replaced

BlockLists = dict[str, dict[str, nn.Module]]  # by the path of a list: its blocks, by their names in the network
_LISTS = (nn.ModuleList, nn.Sequential)
_USE_PLAN = "revzoo.plan(model, batch, budget) needs no list of blocks."


def find_lists(model: nn.Module, paths: Sequence[str], has_batch: bool) -> BlockLists:
    """Return the lists of blocks of these paths, or all lists that have blocks made of layers.

    A list is a ModuleList or Sequential, or any module with numbered children (b1, b2, ...). Of the latter, only a batch or the
    user can say that they are called one after the other.

    Raises:
        UnknownNameError: the network has no list of this path.
        InputError: a path that is none of a list, or a network that cannot be changed as it is.
    """
    require_module(model)
    _require_ordinary(model)
    modules = dict(model.named_modules())
    known = {path: blocks for path, module in modules.items() if (blocks := _name_blocks(module, path)) is not None}
    lists = {
        path: blocks
        for path, blocks in known.items()
        if any(map(_is_made_of_layers, blocks.values())) and (has_batch or isinstance(modules[path], _LISTS))
    }
    for path in paths:
        if path not in modules:
            raise UnknownNameError("list of blocks", path, lists)
        if path not in known:
            raise InputError(
                f"A list of blocks is a ModuleList or Sequential, or has numbered children. Received: {path!r}, a "
                f"{type(modules[path]).__name__}. Lists in this network: {join_names(list(lists))}."
            )
    lists = {path: known[path] for path in paths} if paths else lists
    for path, blocks in lists.items():
        if any(map(get_step, blocks.values())):
            raise InputError(
                f"{path!r} is reversible already. Call revzoo.ordinary_(model) first to change how, or name other lists."
            )
    return lists


def choose_chains(
    model: nn.Module, lists: BlockLists, surveys: Mapping[str, BlockSurvey] | None, is_named: bool
) -> tuple[BlockLists, dict[str, str], tuple[str, ...]]:
    """Return which blocks become chains: of every named list, or of the longest one and those like it.

    A chain is every run of two or more blocks, one after the other, that can be steps. With a batch, the survey says which can.
    Without one, the shapes of weights tell: those of one name are equal. A list is like the longest one if only numbers in its
    path differ, as in the stages of a hierarchical network. Of two lists of one length, one with blocks of a single class comes
    first.

    Args:
        model: the network.
        lists: as from `find_lists`.
        surveys: of their blocks, by name; None without a batch.
        is_named: whether the lists were named. Then, without a batch, blocks may be of several classes.
    Returns:
        The blocks of chains, by their path: that of a list, with a slice if there are several in it; why the other blocks of
        these lists stay ordinary, by name; and the paths of other lists that have blocks for a chain.
    Raises:
        ConversionError: no two such blocks, with the reasons; or a block is in two lists, or part of another one.
    """
    reasons = {name: reason for path in lists for name, reason in _find_reasons(lists[path], surveys, is_named).items()}
    runs = {path: _find_runs(blocks, reasons, surveys, any_class=is_named) for path, blocks in lists.items()}
    if is_named:
        if missed := [path for path in lists if not runs[path]]:
            raise ConversionError(
                f"{missed[0]} has no two blocks one after the other that can be steps of a chain: "
                f"{_describe(lists[missed[0]], reasons)}. Name another list, or none. {_USE_PLAN}"
            )
    elif not any(runs.values()):
        raise ConversionError(_explain(model, lists, reasons, surveys is not None))
    chosen, left = (list(lists), ()) if is_named else _choose(lists, runs, surveys)
    chains: BlockLists = {}
    for each in chosen:
        for run in runs[each]:
            start = list(lists[each]).index(run[0])
            span = f"[{start}:{start + len(run)}]" if len(runs[each]) > 1 else ""
            chains[each + span] = {name: lists[each][name] for name in run}
    _require_distinct(chains)
    inside = {name for run in chains.values() for name in run}
    alone = "differs in class or weights from the blocks next to it"
    if surveys is not None:
        alone = "could be a step, but no block before or after it has the same state and could be one, too"
    ordinary = {name: reasons.get(name, alone) for path in chosen for name in lists[path] if name not in inside}
    return chains, ordinary, left


def _require_ordinary(model: nn.Module) -> None:
    """Raise InputError if the network is reversible already, compiled or planned."""
    if chains := [prefix for prefix, chain in find_chains(model).items() if isinstance(chain, nn.Module)]:
        raise InputError(
            f"{chains[0].removesuffix('.') or type(model).__name__} is a reversible chain already: its activations are rebuilt "
            "in backward as it is."
        )
    if compiled := [name or type(model).__name__ for name, module in model.named_modules() if are_compiled([module])]:
        if any(map(is_replaced, model.modules())):
            raise InputError("The network has a plan. Call revzoo.release(model), then reversible_, then plan again.")
        raise InputError(
            f"A compiled network keeps what its compiler chose. Received: compiled {join_names(compiled, most=3)}. Call "
            "reversible_ before torch.compile."
        )


def _require_distinct(chains: BlockLists) -> None:
    """Raise ConversionError if a block is in two chains, or part of another one."""
    places: dict[nn.Module, str] = {}
    for blocks in chains.values():
        for name, block in blocks.items():
            if block in places:
                raise ConversionError(f"{name} is the same module as {places[block]}: a block is one step of one chain.")
            places[block] = name
    for block, name in places.items():
        if inside := [places[part] for part in block.modules() if part is not block and part in places]:
            raise ConversionError(f"{inside[0]} is a part of {name}. Make one of the two lists reversible.")


def _name_blocks(module: nn.Module, path: str) -> dict[str, nn.Module] | None:
    """Return the blocks of a list by their names; None for a module that is no list."""
    children = {key: block for key, block in module._modules.items() if block is not None}  # entries may be None
    if not isinstance(module, _LISTS):
        children = {
            key: block for key, block in children.items() if re.fullmatch(r"[a-z_]+\d+", key) and _is_made_of_layers(block)
        }
        if len(children) < 2:
            return None
    return {f"{path}.{key}".removeprefix("."): block for key, block in children.items()}


def _is_made_of_layers(block: nn.Module) -> bool:
    # Norms and activations have a number for each channel alone, also where a library wraps them.
    return any(True for _ in block.children()) and any(p.dim() > 1 for p in block.parameters())


def _find_reasons(blocks: Mapping[str, nn.Module], surveys: Mapping[str, BlockSurvey] | None, is_named: bool) -> dict[str, str]:
    """Return why blocks of a list cannot be steps, by name."""
    reasons: dict[str, str] = {}
    counts = Counter(blocks.values())
    is_called = surveys is None or any(surveys[name].calls for name in blocks if name in surveys)
    for name, block in blocks.items():
        survey = None if surveys is None else surveys.get(name)
        if counts[block] > 1:
            other = next(each for each in blocks if blocks[each] is block and each != name)
            reasons[name] = f"is the same module as {other} (shared layers), and a block is one step of one chain"
        elif type(block).forward is nn.Module.forward and "forward" not in vars(block):
            parts = join_names([type(part).__name__ for part in block.children()], most=4)
            reasons[name] = (
                f"is a {type(block).__name__} ({parts}): the network's own code calls its parts and adds what they return "
                "outside of them, so no block returns the next state"
            )
        elif not is_named and not _is_made_of_layers(block):
            reasons[name] = "is not made of layers"
        elif not is_called:
            reasons[name] = "is not called with this batch"
        elif survey is not None and len(blocks) == 1 and survey.calls > 1:
            reasons[name] = f"is called {survey.calls} times (shared layers), and a step of a chain is called once"
        elif survey is not None and survey.reason is not None:
            reasons[name] = survey.reason
    return reasons


def _find_runs(
    blocks: Mapping[str, nn.Module], reasons: Mapping[str, str], surveys: Mapping[str, BlockSurvey] | None, any_class: bool
) -> list[list[str]]:
    """Return the names of blocks that can be steps of one chain: every run of two or more."""
    runs: list[list[str]] = [[]]
    for name, block in blocks.items():
        run = runs[-1]
        if surveys is None:
            may_follow = not run or _may_follow(blocks[run[-1]], block, len(run) == 1, any_class)
        else:
            may_follow = len({surveys[each].state for each in (*run, name)} - {None}) < 2
        if name in reasons or not may_follow:
            runs.append([])
        if name not in reasons:
            runs[-1].append(name)
    return [run for run in runs if sum(surveys is None or surveys[name].calls > 0 for name in run) > 1]


def _may_follow(before: nn.Module, block: nn.Module, is_first: bool, any_class: bool) -> bool:
    """Return whether the weights of two blocks let one follow the other in a chain.

    The first block of a stage may have a projection on its shortcut: a child with weights that the next one does not have,
    besides all that it has.
    """
    shapes = {name: p.shape for name, p in before.named_parameters()}
    common = [(shapes[name], p.shape) for name, p in block.named_parameters() if name in shapes]
    if any(a != b for a, b in common) or not (any_class or type(block) is type(before)):
        return False
    children, following = ({name.partition(".")[0] for name, _ in b.named_parameters()} for b in (before, block))
    return not (is_first and following < children)


def _choose(
    lists: BlockLists, runs: Mapping[str, Sequence[Sequence[str]]], surveys: Mapping[str, BlockSurvey] | None
) -> tuple[list[str], tuple[str, ...]]:
    """Return the paths of the longest list and of those like it, and the paths of others; runs inside blocks do not count."""
    sizes: dict[str, tuple[int, int, bool]] = {}
    blocks = {path: {name: lists[path][name] for run in runs[path] for name in run} for path in lists}
    parts: set[nn.Module] = set()
    for path, own in blocks.items():  # outer lists come first
        if own and parts.isdisjoint(own.values()):
            is_uniform = len({type(block) for block in own.values()}) == 1
            clear = 0 if surveys is None else sum(surveys[name].is_clear for name in own)
            sizes[path] = (clear, len(own), is_uniform)
            if is_uniform:
                parts |= {part for block in own.values() for part in block.modules()}
    longest = max(sizes, key=lambda path: sizes[path])
    alike = [path for path in sizes if _number_out(path) == _number_out(longest)]
    inside = {part for path in alike for block in blocks[path].values() for part in block.modules()}
    return alike, tuple(path for path in sizes if path not in alike and inside.isdisjoint(lists[path].values()))


def _number_out(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _explain(model: nn.Module, lists: BlockLists, reasons: Mapping[str, str], has_batch: bool) -> str:
    """Return why no list of a network has blocks for a chain."""
    wanted = "that can be steps of a chain: each returns its state with something added, in the same shape and dtype"
    advice = ""
    if not has_batch:
        wanted = "of one class and size"
        advice = " A batch may show more, since blocks of several classes are then tried, too: reversible_(model, batch=batch)."
    nearest: dict[str, str] = {}  # the longest list of every kind
    for path in sorted(lists, key=lambda path: -len(lists[path])):
        if len(lists[path]) > 1 or reasons.keys() & lists[path]:
            nearest.setdefault(_number_out(path), path)
    words = [f"{path or 'the network itself'} ({_describe(lists[path], reasons)})" for path in nearest.values()]
    found = f"Lists in it: {join_names(words, most=3)}." if words else "It has no ModuleList or Sequential of such blocks."
    return (
        f"{type(model).__name__} has no list of two or more blocks, one after the other, {wanted}. {found}{advice} {_USE_PLAN}"
    )


def _describe(blocks: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> str:
    """Return which blocks a list has, and why the first one of the most frequent class that cannot be a step cannot."""
    counts = Counter(type(block).__name__ for block in blocks.values())
    kinds = " and ".join(f"{count} {kind}" for kind, count in counts.items())
    names = sorted(blocks, key=lambda name: -counts[type(blocks[name]).__name__])
    words = [f"{name} {reasons[name]}" for name in names if name in reasons][:1]
    if alone := [name for name in blocks if name not in reasons]:
        of_several = f"no two in a row of {join_names(alone, most=3)} have the same state"
        words.append(of_several if len(alone) > 1 else f"{alone[0]} alone could be a step")
    return f"{kinds}: {'; '.join(words)}"
