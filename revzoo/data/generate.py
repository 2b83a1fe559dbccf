"""Continue a text: its ids, the language model that continues them, and the text of the new ids."""

from pathlib import Path

import torch

from revzoo.data.tokenizer import TokenizerFile
from revzoo.errors import DataError, InputError
from revzoo.model.generate import require_language_model
from revzoo.model.model import Model
from revzoo.spec.names import BYTES


def generate(
    model: Model, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_k: int | None = None, seed: int | None = None
) -> str:
    """Return what a causal language model writes after a text, up to the model's length or the token that ends a text.

    The tokenizer is the one of `model.data_config`; without one, ids are bytes. Of a prompt that is longer than half of the
    model's length only the end is read, as much as leaves room for the tokens, but at least that half.

    Args:
        model: the language model; `Model.generate` continues ids.
        prompt: the text.
        tokens: how many to write at most.
        temperature: by which logits are divided before a token is drawn, >= 0; 0: the most probable token is taken.
        top_k: draw among this many of the most probable tokens, >= 1; None: among all.
        seed: of the draws; None: another one each time.
    Raises:
        InputError: the model is no causal language model, the prompt has no token, or an argument is out of range.
        DataError: the tokenizer is missing or does not fit the model.
    """
    input = require_language_model(model)
    context, file = input.length, model.data_config.get("tokenizer", BYTES)
    tokenizer = None if file == BYTES else TokenizerFile(Path(file))
    size = 256 if tokenizer is None else tokenizer.size
    if size > input.vocabulary or (tokenizer is None and size != input.vocabulary):
        raise DataError(
            f"The tokenizer ({file}) has {size} tokens. Received: a model with a vocabulary of {input.vocabulary}. Set "
            "model.data_config = {'tokenizer': 'tokenizer.json'}, with the file of its training."
        )
    ids = list(prompt.encode()) if tokenizer is None else tokenizer.pack([prompt])
    ids = ids[-min(context - 1, max(context // 2, context - tokens)) :]
    if not ids:
        raise InputError(f"A text of at least one token is continued. Received: {prompt!r}.")
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    written = model.generate(batch, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)[0, len(ids) :].tolist()
    end = 0 if tokenizer is None else tokenizer.end
    written = written[: written.index(end)] if end in written else written
    return bytes(written).decode(errors="replace") if tokenizer is None else tokenizer.decode(written)
