"""Continue texts token by token, with a language model whose attention keeps what it has read."""

import torch
from torch import Tensor

from revzoo.errors import InputError
from revzoo.model.network import Network
from revzoo.parts.heads.text import TokenLinear
from revzoo.parts.layers.past import Past
from revzoo.runtime.chain import run_chain
from revzoo.runtime.mode import Mode
from revzoo.runtime.update import Step
from revzoo.spec.schema import TextInput


@torch.inference_mode()
def generate(
    network: Network, ids: Tensor, tokens: int, temperature: float = 1.0, top_k: int | None = None, seed: int | None = None
) -> Tensor:
    """Return texts with new tokens after them; arguments, shapes and errors are those of `Model.generate`."""
    context = require_language_model(network).length
    if not ids.shape[1] < context:
        raise InputError(
            f"{network.spec.name} reads {context} tokens in all. Received: {ids.shape[1]}. Keep the last ones, such as "
            f"ids[:, -{context // 2}:]."
        )
    generator = torch.Generator(ids.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    past, new = Past(context), ids
    for _ in range(min(tokens, context - ids.shape[1])):
        new = _choose(_read(network, new, past), temperature, top_k, generator)
        ids = torch.cat((ids, new), 1)
    return ids


def require_language_model(network: Network) -> TextInput:
    """Return the network's input; raise InputError unless it predicts the next token and its steps keep what they have read."""
    input, head = network.spec.input, network.head
    lacking = [type(step).__name__ for step in network.steps if not getattr(step, "takes_past", False)]
    if not isinstance(input, TextInput) or not isinstance(head, TokenLinear) or head.outputs != input.vocabulary:
        lacking.append(type(head).__name__)
    if lacking or not isinstance(input, TextInput):
        raise InputError(
            "Texts are continued by a language model whose steps see earlier tokens alone, and keep what they have read. "
            f"Received: {network.spec.name} with {lacking[0]}. Use one of revzoo.list_models('rev_gpt*')."
        )
    return input


def _read(network: Network, ids: Tensor, past: Past) -> Tensor:
    """Return the logits of the token after these, (B, vocabulary); the past has then grown by them."""
    pair = network.split(network.stem(ids, past.length))
    steps = [Step(e.module, e.name, network.coupling, Mode.STORE, is_whole=True) for e in network.layout() if e.kind == "step"]
    x1, x2 = run_chain(steps, *pair, side=past, exact=network.exact)
    past.length += ids.shape[1]
    logits: Tensor = network.head(network.fuse(x1[:, -1:], x2[:, -1:]))
    return logits[:, 0]


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Return one id for each text, (B, 1): the most probable at temperature 0, else one that is drawn."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        lowest = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
