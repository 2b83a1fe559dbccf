"""Which backwards are compared with their forwards, what is learned in them, and what a second run leaves behind."""

import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import LayerChain, ReversibleChain, set_tripwire
from revzoo.runtime.node import run_node
from revzoo.runtime.tripwire import Watch

D = 8
MODES = ["invert", "recompute", "selective"]


@pytest.fixture
def compared(monkeypatch):
    """Return the names of what is compared."""
    names: list[str] = []
    judge = Watch.judge

    def note(self, comparison, error, size):
        names.append(comparison.name)
        judge(self, comparison, error, size)

    monkeypatch.setattr(Watch, "judge", note)
    return names


def make_chain(step=None, depth=4, **options):
    torch.manual_seed(0)
    make = step or (lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()))
    return ReversibleChain([make() for _ in range(depth)], **options).double()


def make_streams(batch=3):
    return [
        torch.randn(batch, D, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (0, 1)
    ]


def differentiate(chain, mode, batch=3, loss=lambda chain, y1, y2: (y1.sin() * y2).sum()):
    chain.schedule = mode
    streams = make_streams(batch)
    y1, y2 = chain(*streams)
    wanted = [*streams, *chain.parameters()]
    return [g for g in torch.autograd.grad(loss(chain, y1, y2), wanted, allow_unused=True) if g is not None]


@pytest.mark.parametrize("mode", MODES)
def test_the_first_two_backwards_are_compared_and_later_one_in_seventeen(mode, compared):
    chain = make_chain()
    are_compared = []
    for _ in range(36):
        compared.clear()
        differentiate(chain, mode)
        are_compared.append(bool(compared))
    assert [i for i, each in enumerate(are_compared) if each] == [0, 1, 18, 35]


@pytest.mark.parametrize("change", ["shape", "schedule", "mode of a module", "step"])
def test_what_is_new_is_compared_again(change, compared):
    chain, batch, mode = make_chain(), 3, "invert"
    for _ in range(3):
        compared.clear()
        differentiate(chain, mode, batch)
    assert compared == []
    if change == "shape":
        batch = 4
    elif change == "schedule":
        mode = ["invert", "recompute", "invert", "invert"]
    elif change == "mode of a module":
        chain.eval()
    else:
        chain.steps[2] = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    differentiate(chain, mode, batch)
    assert compared


def test_backwards_that_never_come_do_not_count(compared):
    chain = make_chain()
    for _ in range(5):
        chain(*make_streams())
    for _ in range(2):
        compared.clear()
        differentiate(chain, "invert")
        assert compared


def test_always_compares_all(compared):
    chain = make_chain()
    with set_tripwire("always"):
        for _ in range(5):
            compared.clear()
            differentiate(chain, "invert")
            assert compared


class Masked(nn.Module):
    """A mask is the last that autograd saves."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(D, D), kind

    def forward(self, w):
        mask = torch.from_numpy(np.random.default_rng().random(w.shape) < 0.5)
        h = self.linear(w).tanh()
        if self.kind == "bool":
            return h.masked_fill(mask, 0.0)
        return (h * torch.complex(mask.double(), torch.ones(()).double())).real


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["bool", "complex"])
def test_masks_that_are_drawn_outside_of_torch_are_noticed(mode, kind):
    chain = make_chain(lambda: Masked(kind))
    with pytest.raises(RecoveryError, match="ran differently the second time"):
        differentiate(chain, mode, batch=16)


class Average(nn.Module):
    """An average kept as a plain attribute, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.average, self.calls, self.loss = torch.zeros(()), 0, None

    def forward(self, w):
        h = self.linear(w).tanh()
        self.average = 0.9 * self.average + 0.1 * w.detach().mean()
        self.calls += 1
        self.loss = h.square().mean()
        return h


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_attributes_move_once_and_losses_in_them_are_those_of_forward(mode, compares, error):
    def loss(chain, y1, y2):
        return (y1 * y2).sum() + sum(step.loss for step in chain.steps)

    chain, stored = make_chain(Average), make_chain(Average)
    with set_tripwire(compares):
        for _ in range(4):
            assert error(differentiate(chain, mode, loss=loss), differentiate(stored, "store", loss=loss)) < 1e-12
    for step, other in zip(chain.steps, stored.steps, strict=True):
        assert step.calls == other.calls == 4
        torch.testing.assert_close(step.average, other.average, rtol=1e-9, atol=0)


class Untidy(nn.Module):
    """Puts back at its end what it has changed, without `finally`."""

    def __init__(self):
        super().__init__()
        self.linear, self.twice = nn.Linear(D, D), nn.Linear(D, D)
        self.busy = False

    def forward(self, w):
        assert not self.busy
        assert torch.get_default_dtype() is torch.float32
        self.busy = True
        torch.set_default_dtype(torch.float64)
        weight, self.linear.weight = self.linear.weight, self.twice.weight
        hook = self.twice.register_forward_hook(lambda module, args, out: out * 2)
        out = self.twice(self.linear(w).tanh())
        hook.remove()
        self.linear.weight = weight
        torch.set_default_dtype(torch.float32)
        self.busy = False
        return out


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_run_that_ends_early_leaves_undone_is_put_back(mode, compares, error):
    chain = make_chain(Untidy)
    weights = [step.linear.weight for step in chain.steps]
    expected = differentiate(chain, "store")
    with set_tripwire(compares):
        for _ in range(4):
            assert error(differentiate(chain, mode), expected) < 1e-12
            assert torch.get_default_dtype() is torch.float32
            assert all(step.linear.weight is weight for step, weight in zip(chain.steps, weights, strict=True))
            assert not any(step.busy or step.twice._forward_hooks for step in chain.steps)


def test_small_first_states_are_announced():
    """They are what rounding of later states leaves of them."""
    torch.manual_seed(0)
    chain = ReversibleChain([nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(32)])
    streams = [torch.randn(16, D).mul(1e-6).requires_grad_() for _ in range(2)]
    y1, y2 = chain(*streams)
    with pytest.warns(UserWarning, match=r"Rounding takes .*% of the state before steps\.\d, .* use exact=True"):
        (y1 * y2).sum().backward()
    exact = ReversibleChain(list(chain.steps), exact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y1, y2 = exact(*(x.detach().requires_grad_() for x in streams))
        (y1 * y2).sum().backward()


class Router(nn.Module):
    """Sends each token to two of four experts, all with the same score; every call decides in another way."""

    calls = 0

    def __init__(self, names_experts=True):
        super().__init__()
        self.linear = nn.Linear(D, 4)
        self.names_experts = names_experts
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        Router.calls += 1
        noise = 1e-9 * torch.randn(len(x), 4, dtype=x.dtype, generator=torch.Generator().manual_seed(Router.calls))
        scores = self.linear(x).softmax(-1)
        experts = (scores.detach() + noise).topk(2, -1).indices
        scores = scores.gather(-1, experts)
        return (scores, experts) if self.names_experts else (scores, experts.to(x.dtype))


class Mixture(nn.Module):
    def __init__(self, names_experts=True):
        super().__init__()
        self.router = Router(names_experts)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, w):
        scores, chosen = self.router(w)
        out = torch.zeros_like(w)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out = out.index_add(0, token, expert(w[token]).tanh() * scores[token, place, None])
        return out


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_near_tie_is_decided_as_in_forward(mode, compares, error):
    def run(chain, mode):
        Router.calls = 0
        return differentiate(chain, mode, batch=24)

    chain = make_chain(Mixture)
    expected = run(chain, "store")
    with set_tripwire(compares):
        for _ in range(4):
            assert error(run(chain, mode), expected) < 1e-8


@pytest.mark.parametrize("keep", ["*.router", "router", [Router], lambda module: isinstance(module, Router)])
def test_regions_that_are_named_are_kept(keep, error):
    def run(chain, mode):
        Router.calls = 0
        return differentiate(chain, mode, batch=24)

    step = lambda: Mixture(names_experts=False)  # noqa: E731  nothing shows that these are indices
    with pytest.raises(RecoveryError, match=r"steps\.3 ran differently"):
        run(make_chain(step), "recompute")
    chain = make_chain(step, keep=keep)
    expected = run(chain, "store")
    for mode in MODES:
        assert error(run(chain, mode), expected) < 1e-8


class Routed(nn.Module):
    """A step with a region of the test's own."""

    def __init__(self, region, use):
        super().__init__()
        self.region, self.use = region(), use
        self.codes = nn.Parameter(torch.randn(6, D))

    def forward(self, w):
        return self.use(self, w)


class Codes(nn.Module):
    """Returns scores, and codes if it is asked for them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 4)

    def forward(self, x, names_codes=True):
        scores = self.linear(x).softmax(-1)
        return (scores, scores.argmax(-1)) if names_codes else scores


class Generates(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return (layer(x).tanh() for layer in (self.a, self.b))


def change_codes(step, w):
    scores, codes = step.region(w)
    codes.add_(1)
    return step.codes[codes] * scores[..., :1]


def change_scores(step, w):
    scores, codes = step.region(w)
    scores = scores.detach()
    scores *= 2
    return step.codes[codes] * (w.sum(-1, keepdim=True) + scores[..., :1])


def ask_for_codes_in_the_second_call(step, w):
    first = step.region(w, names_codes=False)
    scores, codes = step.region(w * 2)
    return step.codes[codes] * (first * scores)[..., :1]


def map_over_examples(step, w):
    scores, codes = torch.func.vmap(lambda x: step.region(x))(w)
    return step.codes[codes] * scores[..., :1]


def add_up(step, w):
    return sum(step.region(w), torch.zeros_like(w))


@pytest.mark.parametrize("use", [change_codes, change_scores, ask_for_codes_in_the_second_call, map_over_examples, add_up])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_step_does_with_a_region(use, mode, error):
    region = Generates if use is add_up else Codes
    chain, stored = (make_chain(lambda: Routed(region, use)) for _ in range(2))
    expected = differentiate(stored, "store", batch=12)
    for _ in range(4):
        assert error(differentiate(chain, mode, batch=12), expected) < 1e-10


def test_a_scripted_submodule_has_no_hooks(error):
    script = lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.GELU())), nn.Linear(D, D))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chain = make_chain(script)
    for _ in range(3):  # TorchScript runs as it is written at first, and saves other tensors later
        expected = differentiate(chain, "store")
    assert error(differentiate(chain, "recompute"), expected) < 1e-10


def test_regions_next_to_an_inverse_are_kept_and_those_with_one_are_refused():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 1

        def inverse(self, x):
            return x

    step = lambda: nn.Sequential(Mixture(names_experts=False), Scale())  # noqa: E731
    Router.calls = 0
    differentiate(make_chain(step, keep="*.router"), "invert", batch=24)
    with pytest.raises(InputError, match=r"keep names a Scale of steps\.0 that is compiled, scripted or made of layers"):
        differentiate(make_chain(step, keep=[Scale]), "recompute")


class Choosing(nn.Module):
    """Multiplies with one of two weights, which NumPy or an attribute chooses."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(D, D) for _ in range(2))
        self.chosen = 0

    def forward(self, w):
        return (w @ self.weights[self.chosen]).sin()


@pytest.mark.parametrize("mode", MODES)
def test_a_product_with_another_weight_is_another_product(mode, error):
    """As where two forwards with different adapters precede both backwards."""
    chain = make_chain(Choosing)
    expected = differentiate(chain, "store")
    chain.schedule = mode
    streams = make_streams()
    y1, y2 = chain(*streams)
    for step in chain.steps:
        step.chosen = 1
    with pytest.raises(RecoveryError, match="ran differently the second time"):
        (y1.sin() * y2).sum().backward()
    for step in chain.steps:
        step.chosen = 0
    assert error(differentiate(chain, mode), expected) < 1e-10


class Writes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(D, D), function

    def forward(self, w):
        return self.function(self.linear(w), w)


def double_unseen(h, w):
    h.detach().numpy()[...] *= 2
    return h.sin()


def read_unseen(h, w):
    return (torch.from_numpy(h.detach().numpy() * 2) * w).sin()


@pytest.mark.parametrize("function", [double_unseen, read_unseen])
@pytest.mark.parametrize("toggles", [False, True])
def test_products_that_are_read_or_written_unseen_are_not_kept(function, toggles, error):
    chain, stored = (make_chain(lambda: Writes(function)) for _ in range(2))
    expected = differentiate(stored, "store")
    for i in range(6):
        if toggles:
            for step in chain.steps:
                step.linear.train(i % 2 == 0)
        assert error(differentiate(chain, "selective"), expected) < 1e-12


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_submodule_exchanged_before_backward_is_named(rounds):
    chain = make_chain()
    for _ in range(rounds):
        differentiate(chain, "invert")
    y1, y2 = chain(*make_streams())
    chain.steps[1][0] = nn.Linear(D, D).double()
    with pytest.raises(RecoveryError, match=r"'0' of steps\.1 was another tensor or module in forward"):
        (y1 * y2).sum().backward()


def test_exchanged_weights_are_freed_by_the_next_forward():
    chain = make_chain()
    for _ in range(3):
        differentiate(chain, "invert")
    weight = weakref.ref(chain.steps[0][0].weight)
    chain.load_state_dict({key: t.clone() for key, t in chain.state_dict().items()}, assign=True)
    with torch.no_grad():
        chain(*make_streams())
    assert weight() is None


def test_a_failing_forward_leaves_no_hooks():
    chain = make_chain(Mixture)
    chain.steps[2].experts[1] = nn.Linear(D + 1, D).double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            chain(*make_streams(24))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in chain.modules())


def test_a_node_and_a_layer_have_rounds_of_their_own(compared):
    node, chain = nn.Sequential(nn.Linear(D, D), nn.Tanh()), LayerChain(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    chain.schedule = "recompute"
    for i in range(4):
        compared.clear()
        x = torch.randn(3, D, requires_grad=True)
        run_node(node, "stem", "recompute", x).sum().backward()
        assert bool(compared) == (i < 2)
        compared.clear()
        chain(x).sum().backward()
        assert bool(compared) == (i < 2)


@pytest.mark.parametrize("mode", MODES)
def test_rounds_end_where_the_first_steps_are_frozen(mode, compared):
    chain = make_chain()
    chain.steps[0].requires_grad_(False)
    chain.schedule = mode
    for i in range(5):
        compared.clear()
        x1, x2 = (x.detach() for x in make_streams())
        y1, y2 = chain(x1, x2)
        (y1 * y2).sum().backward()
        assert bool(compared) == (i < 2)
    assert all(step[0].weight.grad is not None for step in list(chain.steps)[1:])


def test_functions_learn_nothing_from_one_another(error):
    """A node may be a plain function."""

    def untidy(x):
        torch.set_default_dtype(torch.float64)
        h = (x @ x.mT).sin()
        h.detach().numpy()[...] *= 2
        torch.set_default_dtype(torch.float32)
        return h.cos()

    def tidy(x):
        return (x @ x.mT).sin()

    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    for function in (untidy, tidy):
        expected = torch.autograd.grad(function(x).sum(), x)
        for _ in range(4):
            assert error(torch.autograd.grad(run_node(function, "node", "selective", x).sum(), x), expected) < 1e-12
            assert torch.get_default_dtype() is torch.float32


def test_a_chain_is_pickled_without_what_belongs_to_its_latest_forward():
    chain = make_chain()
    differentiate(chain, "invert")
    data = pickle.dumps(chain)
    assert b"runtime.update" not in data
    assert b"inventory" not in data
    copy = pickle.loads(data)
    assert all(map(torch.equal, differentiate(copy, "invert"), differentiate(chain, "invert")))
