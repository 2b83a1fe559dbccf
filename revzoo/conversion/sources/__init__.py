"""The families of networks that can be converted, one file each."""

from revzoo.conversion.original import Original
from revzoo.conversion.sources.base import IN_PLACE, Source
from revzoo.conversion.sources.irevnet import IRevNet
from revzoo.conversion.sources.mmpretrain import MMPretrain
from revzoo.conversion.sources.pyslowfast import PySlowFast
from revzoo.conversion.sources.revnet import RevNet
from revzoo.conversion.sources.timm_base import TimmSource
from revzoo.conversion.sources.timm_mvit import TimmMViT
from revzoo.conversion.sources.timm_resnet import TimmResNet
from revzoo.conversion.sources.timm_swin import TimmSwin
from revzoo.conversion.sources.timm_vit import TimmViT
from revzoo.conversion.sources.transformers_bert import BERT, ELECTRA, ROBERTA
from revzoo.conversion.sources.transformers_decoder import TransformersGPT2, TransformersLlama
from revzoo.conversion.sources.transformers_distilbert import DISTILBERT
from revzoo.errors import ConversionError, join_names

SOURCES: tuple[Source, ...] = (
    TimmViT(),
    TimmSwin(),
    TimmMViT(),
    TimmResNet(),
    BERT,
    ROBERTA,
    ELECTRA,
    DISTILBERT,
    TransformersGPT2(),
    TransformersLlama(),
    PySlowFast(),
    MMPretrain(),
    IRevNet(),
    RevNet(),
)


def find_source(original: Original) -> Source:
    """Return the source that an original belongs to.

    Raises:
        ConversionError: no source handles it; the message lists all sources.
    """
    candidates = find_candidates(original)
    for source in candidates:
        if source.recognises(original.tensors):
            return source
    raise ConversionError(
        f"{original.name} can be converted, but these tensors do not belong to a "
        f"{' or '.join(source.name for source in candidates)}. Received: {join_names(list(original.tensors), most=4)}. Is "
        "this checkpoint for another model?"
    )


def find_candidates(original: Original) -> list[Source]:
    """Return the sources of which an original may be, whatever its tensors.

    Raises:
        ConversionError: there is none; the message lists all sources.
    """
    if candidates := [source for source in SOURCES if source.handles(original.description)]:
        return candidates
    received, hint = _describe(original)
    names = join_names([source.name for source in SOURCES])
    raise ConversionError(f"{received} cannot be converted.{hint} What can: {names}. {IN_PLACE}")


def _describe(original: Original) -> tuple[str, str]:
    """Return what an original is, with its library, and a sentence on timm's network of the same name if there is one."""
    description = original.description
    if isinstance(description, dict):
        return f"{original.name} ({description.get('model_type', 'a configuration without model_type')})", ""
    name, library = type(description).__name__, type(description).__module__.partition(".")[0]
    received = f"{name} of {library}"
    known = (source.network_class for source in SOURCES if isinstance(source, TimmSource))
    family = next((each.__module__.rpartition(".")[2] for each in known if each.__name__ == name), None)
    hint = f" timm's {name} can: give one of timm.list_models(module={family!r}), with its weights." if family else ""
    return received if original.name == name else f"{original.name} ({received})", hint
