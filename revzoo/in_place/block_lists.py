"""The lists of blocks in a network: the longest one, those of given paths, and what cannot be made reversible."""

from collections.abc import Iterator, Sequence

from torch import nn

from revzoo.analysis.chains import find_chains
from revzoo.analysis.dry_run import require_module
from revzoo.block_steps.block_chain import get_step
from revzoo.block_steps.conventions import is_checkpointed
from revzoo.errors import ConversionError, InputError, UnknownNameError, join_names
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.replaced_call import is_replaced

BlockLists = dict[str, dict[str, nn.Module]]  # by the path of a list: its blocks, by their names in the network


def choose_lists(model: nn.Module, paths: Sequence[str]) -> tuple[BlockLists, BlockLists]:
    """Return the lists of blocks of these paths, or the longest one, and the other lists of such blocks.

    Args:
        model: the network.
        paths: of the lists; none for the longest one.
    Raises:
        UnknownNameError: the network has no list of this path.
        InputError: no list of blocks, or one whose blocks cannot be the steps of a chain.
    """
    require_module(model)
    _require_ordinary(model)
    candidates: BlockLists = dict(_find_lists(model, ""))
    if not candidates and not paths:
        raise InputError(
            f"{type(model).__name__} has no list of two or more blocks of one class and size. Name a ModuleList or Sequential: "
            "reversible_(model, 'path.of.blocks')."
        )
    chosen = {path: _get_list(model, path, candidates) for path in paths}
    if not paths:
        longest = max(candidates, key=lambda path: len(candidates[path]))
        chosen = {longest: candidates[longest]}
    _require_distinct(chosen)
    return chosen, {path: blocks for path, blocks in candidates.items() if path not in chosen}


def _find_lists(module: nn.Module, path: str) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the lists of blocks of one class and size, but not those inside of such blocks."""
    if isinstance(module, nn.ModuleList | nn.Sequential) and _are_alike(list(module)):
        yield path, _name_blocks(module, path)
        return
    for name, child in module.named_children():
        yield from _find_lists(child, f"{path}.{name}".removeprefix("."))


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Return whether these are several blocks of one class, made of layers, whose weights of one name have one shape."""
    if len(blocks) < 2 or len({type(block) for block in blocks}) > 1 or not list(blocks[0].children()):
        return False
    shapes = {name: p.shape for name, p in blocks[0].named_parameters()}
    return bool(shapes) and all(
        p.shape == shapes.get(name, p.shape) for block in blocks for name, p in block.named_parameters()
    )


def _get_list(model: nn.Module, path: str, candidates: BlockLists) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if path not in modules:
        raise UnknownNameError("list of blocks", path, candidates)
    module = modules[path]
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        raise InputError(
            f"A list of blocks is a ModuleList or Sequential of two or more. Received: {path!r}, a {type(module).__name__}. "
            f"Lists in this network: {join_names(list(candidates))}."
        )
    return _name_blocks(module, path)


def _name_blocks(blocks: nn.ModuleList | nn.Sequential, path: str) -> dict[str, nn.Module]:
    return {f"{path}.{i}".removeprefix("."): block for i, block in enumerate(blocks)}


def _require_ordinary(model: nn.Module) -> None:
    """Raise InputError if the network is reversible already, compiled, planned or checkpointed."""
    if chains := [prefix for prefix, chain in find_chains(model).items() if isinstance(chain, nn.Module)]:
        raise InputError(
            f"{chains[0].removesuffix('.') or type(model).__name__} is a reversible chain already: its activations are rebuilt "
            "in backward as it is."
        )
    if is_compiled(model):
        if any(map(is_replaced, model.modules())):
            raise InputError("The network has a plan. Call revzoo.release(model), then reversible_, then plan again.")
        raise InputError("A compiled network keeps what its compiler chose. Call reversible_ before torch.compile.")
    for name, module in model.named_modules():
        if is_checkpointed(module):
            raise InputError(
                "Gradient checkpointing keeps the input of every block, reversible blocks keep none. Received: both, for "
                f"{name or type(model).__name__}. First call model.activation_checkpointing_disable() of Transformers "
                "(gradient_checkpointing_disable() in older versions), or model.set_grad_checkpointing(False) of timm."
            )


def _require_distinct(chosen: BlockLists) -> None:
    """Raise InputError if a block is in two places, reversible already, or part of another one."""
    places: dict[nn.Module, str] = {}
    for path, blocks in chosen.items():
        for name, block in blocks.items():
            if block in places:
                raise ConversionError(f"{name} is the same module as {places[block]}: a block is one step of one chain.")
            if get_step(block) is not None:
                raise InputError(f"{path!r} is reversible already. Call revzoo.ordinary_(model) first to change how.")
            places[block] = name
    for block, name in places.items():
        inside = next((places[part] for part in block.modules() if part is not block and part in places), None)
        if inside is not None:
            raise ConversionError(f"{inside} is a part of {name}. Make one of the two lists reversible.")
