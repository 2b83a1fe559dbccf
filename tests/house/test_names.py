"""The public names: pinned, and documented where they are defined."""

import importlib
import inspect
import pkgutil
import re

import pytest
from torch import nn

import revzoo
import revzoo.parts
import revzoo.runtime
from revzoo import errors, registry

CLASSES = {
    "ChunkReport", "ConvertReport", "Fits", "MemoryReport", "Model", "ModulePlan", "NumericsReport", "Plan", "Profile",
    "ReversibleReport", "Spec", "VerifyReport",
}  # fmt: skip
PINNED = {
    "build": "(spec)",
    "choose_tiles": "(model, batch, *, loss=None)",
    "chunk_loss_": "(model, head=None, *, batch=None, loss=None, chunk=None)",
    "chunked_loss": "(head, hidden, labels, *, loss=None, reduction='mean', ignore_index=-100, label_smoothing=0.0, "
    "z_loss=0.0, chunk=None)",
    "convert": "(source, weights=None, *, coupling='momentum', kept_bits=8, sign='fixed', m=None, beta=None, out=None, "
    "strict=True, num_outputs=None, batch=None)",
    "create": "(source, *, pretrained=False, checkpoint=None, num_outputs=None, overrides=None, schedule='invert', "
    "tiles=1, lookahead=0, exact=False, device=None, dtype=None, **others)",
    "export": "(folder, out, weights=None)",
    "fits": "(model, batch, card=None, *, optimizer=None, loss=None, vary_length=False, report=None)",
    "generate": "(model, prompt, *, tokens=200, temperature=0.8, top_k=None, seed=None)",
    "list_models": "(pattern='*')",
    "load_spec": "(source, overrides=())",
    "measure_memory": "(model, batch, optimizer=None, *, loss=None)",
    "measure_numerics": "(model, batch, *, loss=None)",
    "plan": "(model, batch, budget, *, solver='timeline', optimizer=None, loss=None, lookahead=0, tiles=None, "
    "accumulate=False, profile=False, compiled=None)",
    "profile": "(model, batch, optimizer=None, *, loss=None, run=True, other_bytes=0, budget=None)",
    "reforward": "(module, batch, budget=None, *, optimizer=None, loss=None)",
    "ordinary_": "(model)",
    "release": "(module)",
    "reversible_": "(model, *paths, batch=None, coupling='momentum', kept_bits=8, sign='fixed', fraction_bits=None, "
    "split=None, tiles=1, keep=())",
    "solve": "(profile, budget, solver='timeline')",
    "transform": "(model)",
    "verify": "(model, batch, *, loss=None)",
}
RUNTIME = {
    "Bijection", "Coupled", "CoupledConv2d", "Coupling", "InPlaceABN2d", "InvertibleBatchNorm2d", "InvertibleLeakyReLU",
    "LayerChain", "LiveBytes", "PixelUnshuffle", "ReversibleChain", "SpaceToBatch", "SpaceToDepth", "set_tripwire",
    "tiled",
}  # fmt: skip
MODEL_NAMES = {
    "steps", "units", "schedule", "tiles", "exact", "lookahead", "spec", "num_outputs",
    "forward", "forward_features", "inverse", "reset_head", "example_input", "generate",
    "no_weight_decay", "group_matcher", "set_coupling", "layout", "has_streams",
    "save_pretrained", "from_pretrained", "push_to_hub",
    "num_classes", "num_features", "head_hidden_size", "get_classifier", "reset_classifier", "forward_head",
    "feature_info", "forward_intermediates", "pretrained_cfg", "default_cfg", "data_config", "class_names",
}  # fmt: skip
REGISTRIES = ("stems", "splits", "branches", "transitions", "fuses", "heads", "inits", "couplings")
REGISTERED = [(kind, name) for kind in REGISTRIES for name in getattr(registry, kind)]


def modules():
    return [importlib.import_module(module.name) for module in pkgutil.walk_packages(revzoo.__path__, "revzoo.")]


def defined(module):
    """Yield names and values of all functions and classes of a module that have no underscore."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


def members(owner: type):
    """Yield names and values of the methods and properties that a class defines, underscores left out."""
    for name, member in vars(owner).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, (property, classmethod))):
            yield f"{owner.__name__}.{name}", getattr(owner, name)


def sections(text: str) -> dict[str, str]:
    """Return the body of every Google section of a docstring."""
    parts = re.split(r"^(Shapes|Args|Raises|Cost|Source|Example|Yields|Returns): ?", inspect.cleandoc(text), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def signature(function) -> str:
    """Return names and defaults, without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


def test_public_names_are_the_pinned_ones():
    assert set(revzoo.__all__) == {*CLASSES, *PINNED}
    assert set(revzoo.__all__) <= set(dir(revzoo))
    assert {name: signature(getattr(revzoo, name)) for name in PINNED} == PINNED
    assert set(revzoo.runtime.__all__) == RUNTIME
    assert signature(revzoo.runtime.ReversibleChain) == "(steps, coupling='additive', exact=False, lookahead=0, keep=())"


def test_a_model_has_the_pinned_members():
    model = revzoo.create("rev_vit_digits", device="meta")
    assert {name for name in MODEL_NAMES if hasattr(model, name)} == MODEL_NAMES
    classes = [each for each in revzoo.Model.__mro__ if each.__module__.startswith("revzoo.")]
    own = {name for each in classes for name in vars(each) if not name.startswith("_")}
    assert own <= MODEL_NAMES, "a public name that nobody pinned"


def test_an_unknown_public_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'planner'\. Public names: .*create"):
        _ = revzoo.planner


def test_everything_public_says_what_it_is():
    documented = [row for module in modules() for row in defined(module)]
    public = [getattr(revzoo, name) for name in CLASSES] + [getattr(revzoo.runtime, name) for name in RUNTIME]
    documented += [row for value in public if inspect.isclass(value) for row in members(value)]
    assert len(documented) > 130
    assert [name for name, value in documented if not inspect.getdoc(value)] == []
    assert [module.__name__ for module in modules() if not module.__doc__] == []


@pytest.mark.parametrize(
    ("where", "name"), [("revzoo", name) for name in (*sorted(CLASSES), *PINNED)] + [("revzoo.runtime", "ReversibleChain")]
)
def test_public_names_list_arguments_shapes_and_errors(where, name):
    value = getattr(importlib.import_module(where), name)
    own = sections(value.__doc__)
    if is_module(value):
        assert "Shapes" in own
    if "Args" in own:
        stale = set(re.findall(r"^\s{0,4}(\w+):", own["Args"], flags=re.M)) - set(inspect.signature(value).parameters)
        assert not stale, "documented and gone"
    if inspect.isfunction(value):
        optional = {key for key, p in inspect.signature(value).parameters.items() if p.default is not p.empty}
        assert {key for key in optional if f"{key}:" not in own.get("Args", "")} <= {"pattern"}
    for error in re.findall(r"^\s*(\w+Error):", own.get("Raises", ""), flags=re.M):
        assert hasattr(errors, error)


def is_module(value) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


@pytest.mark.parametrize(("kind", "name"), REGISTERED, ids="-".join)
def test_every_part_documents_what_a_spec_may_set(kind, name):
    entry = getattr(registry, kind)[name]
    own = sections(entry.__doc__)
    if is_module(entry):
        assert "Shapes" in own
        assert [key for key in getattr(registry, kind).arguments(name) if f"{key}:" not in own.get("Args", "")] == []
    if kind != "heads":
        assert "Source" in own, "every number has a source"


def test_registries_are_all_enumerated():
    assert {name for name, value in vars(registry).items() if isinstance(value, registry.Registry)} == set(REGISTRIES)
    assert len(REGISTERED) >= 19
