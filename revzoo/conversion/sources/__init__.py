"""All sources, and which of them a network is from."""

from revzoo.conversion.original import Original
from revzoo.conversion.sources.base import Source
from revzoo.conversion.sources.mmpretrain import MMPretrain
from revzoo.conversion.sources.pyslowfast import PySlowFast
from revzoo.conversion.sources.timm_mvit import TimmMViT
from revzoo.conversion.sources.timm_resnet import TimmResNet
from revzoo.conversion.sources.timm_swin import TimmSwin
from revzoo.conversion.sources.timm_vit import TimmViT
from revzoo.conversion.sources.transformers_bert import BERT, ROBERTA
from revzoo.errors import ConversionError, listing

SOURCES: tuple[Source, ...] = (
    TimmViT(),
    TimmSwin(),
    TimmMViT(),
    TimmResNet(),
    BERT,
    ROBERTA,
    PySlowFast(),
    MMPretrain(),
)


def source_of(original: Original) -> Source:
    """Return the source for a network.

    Raises:
        ConversionError: there is none; names what there is.
    """
    fitting = [source for source in SOURCES if source.fits(original.description)]
    found = next((source for source in fitting if source.recognises(original.tensors)), None)
    if found is not None:
        return found
    names = listing([source.name for source in SOURCES])
    if fitting:
        keys = listing(list(original.tensors), most=4)
        raise ConversionError(
            f"{original.name} is known, but the tensors are not those of {listing([source.name for source in fitting])}: they "
            f"are called {keys}."
        )
    kind = original.description
    told = kind.get("model_type", "a configuration without model_type") if isinstance(kind, dict) else type(kind).__name__
    raise ConversionError(f"{original.name} ({told}) cannot be converted. What can: {names}.")
