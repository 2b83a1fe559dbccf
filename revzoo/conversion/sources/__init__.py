"""The families of networks that can be converted, one file each."""

from revzoo.conversion.original import Original
from revzoo.conversion.sources.base import IN_PLACE, Source
from revzoo.conversion.sources.mmpretrain import MMPretrain
from revzoo.conversion.sources.pyslowfast import PySlowFast
from revzoo.conversion.sources.timm_mvit import TimmMViT
from revzoo.conversion.sources.timm_resnet import TimmResNet
from revzoo.conversion.sources.timm_swin import TimmSwin
from revzoo.conversion.sources.timm_vit import TimmViT
from revzoo.conversion.sources.transformers_bert import BERT, ELECTRA, ROBERTA
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
    PySlowFast(),
    MMPretrain(),
)


def find_source(original: Original) -> Source:
    """Return the source that an original belongs to.

    Raises:
        ConversionError: no source handles it; the message lists all sources.
    """
    candidates = [source for source in SOURCES if source.handles(original.description)]
    for source in candidates:
        if source.recognises(original.tensors):
            return source
    if candidates:
        raise ConversionError(
            f"{original.name} can be converted, but these tensors do not belong to a "
            f"{' or '.join(source.name for source in candidates)}. Received: {join_names(list(original.tensors), most=4)}. Is "
            "this checkpoint for another model?"
        )
    description = original.description
    if isinstance(description, dict):
        kind = description.get("model_type", "a configuration without model_type")
    else:
        kind = type(description).__name__
    names = join_names([source.name for source in SOURCES])
    raise ConversionError(f"{original.name} ({kind}) cannot be converted. What can: {names}. {IN_PLACE}")
