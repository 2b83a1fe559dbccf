"""When and in which order steps are recovered, and what autograd's less usual calls do."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from revzoo.errors import InputError, RecoveryError, RevzooError
from revzoo.runtime import Coupling, LiveBytes, ReversibleChain, set_tripwire


class Logged(nn.Module):
    """A linear step, an activation behind it, that notes each time it is run and each time it ends."""

    def __init__(self, number: int, log: list[str]):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.number, self.note = number, log.append  # the list would be as it was after a second run

    def forward(self, w):
        self.note(f"f{self.number}")
        out = self.linear(w).tanh()
        self.note(f"end{self.number}")
        return out


def logged(depth: int) -> tuple[ReversibleChain, list[str]]:
    log: list[str] = []
    return ReversibleChain([Logged(i, log) for i in range(depth)]).double(), log


def starts(log: list[str]) -> list[str]:
    return [entry for entry in log if entry.startswith("f")]


@pytest.mark.parametrize(
    ("schedule", "recovered"),
    [
        ("store", []),
        ("invert", ["f3", "f2", "f1", "f0"]),
        ("recompute", ["f3", "f2", "f1", "f0"]),
        ("selective", ["f3", "f2", "f1", "f0"]),
        (["invert", "invert", "store", "store"], ["f1", "f0"]),
        (["store", "store", "invert", "invert"], ["f3", "f2"]),
        (["invert", "store", "selective", "invert"], ["f3", "f2", "f0"]),
    ],
)
def test_each_dropped_step_runs_once_more_in_reverse_order(schedule, recovered, streams):
    chain, log = logged(4)
    chain.schedule = schedule
    y1, y2 = chain(*streams)
    assert starts(log) == ["f0", "f1", "f2", "f3"]
    log.clear()
    (y1.sum() + y2.sum()).backward()
    assert starts(log) == recovered


def test_only_the_steps_that_backward_reaches_are_recovered(streams):
    chain, log = logged(4)
    y1, y2 = chain(*streams)
    log.clear()
    torch.autograd.grad(y1.sum() + y2.sum(), list(chain.steps[2].parameters()))
    assert starts(log) == ["f3", "f2"]


def test_a_frozen_step_is_still_run_to_get_below_it(streams):
    chain, log = logged(4)
    chain.steps[3].requires_grad_(False)
    x1, x2 = (x.detach() for x in streams)
    chain.steps[0].requires_grad_(False)
    y1, _ = chain(x1, x2)
    log.clear()
    y1.sum().backward()  # w[3] = w[1] + f2(w[2]): f3 is no part of it
    assert starts(log) == ["f3", "f2", "f1"]
    assert all((p.grad is None) == (i in (0, 3)) for i, step in enumerate(chain.steps) for p in step.parameters())


def test_recompute_stops_at_the_last_dropped_tensor(streams):
    log: list[str] = []
    chain = ReversibleChain([nn.Sequential(Logged(0, log), nn.Linear(6, 6), Logged(1, log))]).double()
    chain.schedule = "recompute"
    y1, y2 = chain(*streams)
    log.clear()
    (y1.sum() + y2.sum()).backward()
    assert log == ["f0", "end0", "f1"]  # tanh's own output is its last saved tensor: the run ends inside Logged 1


@pytest.mark.parametrize("schedule", ["invert", "selective"])
def test_parts_of_a_retained_graph_in_any_order(schedule, chain_of, streams, error):
    chain = chain_of(5)
    loss, expected_loss = (compute_loss(chain, mode, streams) for mode in (schedule, "store"))
    everything = [*streams, *chain.parameters()]
    for wanted in (everything, everything, *(list(chain.steps[k].parameters()) for k in (0, 3, 1, 4, 2))):
        grads = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert error(grads, torch.autograd.grad(expected_loss, wanted, retain_graph=True)) < 1e-12


def compute_loss(chain: ReversibleChain, schedule: object, streams: tuple[Tensor, Tensor]) -> Tensor:
    chain.schedule = schedule
    y1, y2 = chain(*streams)
    return (y1.sin() * y2).sum()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective", ["invert", "selective", "store", "invert"]])
def test_derivatives_of_derivatives_are_those_of_the_stored_run(schedule, exact, chain_of, streams, error):
    chain = chain_of(4, exact=exact)
    wanted = [*streams, *chain.parameters()]

    def run(schedule):
        chain.schedule = schedule
        y1, y2 = chain(*streams)
        loss = (y1 * y2).sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(loss + sum(g.sin().sum() for g in first), wanted, create_graph=True)
        third = torch.autograd.grad(sum(g.sin().sum() for g in second), wanted)
        return [*first, *second, *third]

    grads, expected = run(schedule), run("store")
    assert all(g.norm() > 1e-3 for g in expected)
    assert all(map(torch.equal, grads, expected)) if exact else error(grads, expected) < 1e-10


@pytest.mark.parametrize("schedule", ["invert", "recompute"])
def test_a_kept_tensor_changed_in_place_is_refused(schedule, chain_of, streams):
    chain = chain_of(1)
    chain.schedule = schedule
    y1, y2 = chain(*streams)
    loss = y1.sum() + y2.sum()
    where = "after" if schedule == "invert" else "before"
    with torch.no_grad():
        (y2 if schedule == "invert" else streams[1]).add_(1)
    with pytest.raises(RecoveryError, match=rf"\(3, 6\) that backward needs, the state {where} steps\.0, .* x = x \+ y"):
        loss.backward()


def test_a_step_that_runs_differently_the_second_time_is_refused(streams):
    class Alternating(nn.Module):
        calls = 0

        def forward(self, w):
            self.calls += 1
            return w.tanh() if self.calls % 2 else w.sin().exp()

    y1, y2 = ReversibleChain([nn.Tanh(), Alternating()])(*streams)
    with pytest.raises(RecoveryError, match=r"steps\.1 ran differently the second time: .* 'store'"):
        (y1 * y2).sum().backward()


def test_relu_in_front_and_a_skip_around_the_chain(chain_of, streams, error):
    chain = chain_of(3)

    def run(schedule):
        chain.schedule = schedule
        h1, h2 = (torch.relu(x) for x in streams)
        y1, y2 = chain(h1, h2)
        loss = ((y1 + h1) * (y2 - h2)).sin().sum()
        return list(torch.autograd.grad(loss, [*streams, *chain.parameters()]))

    assert error(run("invert"), run("store")) < 1e-12


def test_inputs_and_outputs_are_unchanged_by_backward(chain_of, streams):
    x1, x2 = (x.detach().clone() for x in streams)
    y1, y2 = chain_of(4)(*streams)
    z1, z2 = y1.detach().clone(), y2.detach().clone()
    (y1 * y2).sum().backward()
    assert [torch.equal(a, b) for a, b in ((streams[0], x1), (streams[1], x2), (y1, z1), (y2, z2))] == [True] * 4


@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective", ["invert", "selective", "store"]])
def test_inputs_without_gradient_and_parameters_frozen_here_and_there(schedule, chain_of, streams, gradients, error):
    chain = chain_of(3)
    frozen = [x.detach() for x in streams]
    expected = gradients(chain, frozen, "store")
    assert len(expected) == len(list(chain.parameters()))
    assert error(gradients(chain, frozen, schedule), expected) < 1e-12
    for i, parameter in enumerate(chain.parameters()):
        parameter.requires_grad_(i % 3 != 0)
    for inputs in (frozen, streams):
        assert error(gradients(chain, inputs, schedule), gradients(chain, inputs, "store")) < 1e-12


def test_hooks_fire_once_on_parameters_and_once_per_run_on_modules(chain_of, streams):
    chain = chain_of(2)
    counts = {"grad": 0, "accumulated": 0, "forward": 0, "backward": 0}

    def count(what):
        counts[what] += 1

    weight = chain.steps[0][1].weight
    weight.register_hook(lambda _: count("grad"))
    weight.register_post_accumulate_grad_hook(lambda _: count("accumulated"))
    chain.steps[1].register_forward_hook(lambda *_: count("forward"))
    chain.steps[1].register_full_backward_hook(lambda *_: count("backward"))
    y1, y2 = chain(*streams)
    (y1 * y2).sum().backward()
    assert counts == {"grad": 1, "accumulated": 1, "forward": 2, "backward": 1}


@pytest.mark.parametrize(
    ("schedule", "kept"), [("invert", 2), ("recompute", 4), ("selective", 4), (["invert", "recompute", "invert", "invert"], 3)]
)
def test_a_graph_is_freed_without_the_garbage_collector(schedule, kept, streams):
    chain = ReversibleChain([Function(torch.tanh) for _ in range(4)])
    chain.schedule = schedule
    with LiveBytes():  # PyTorch may import its compiler here, which leaves the frames around it to the garbage collector
        chain(*streams)[0].sum().backward()
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            known = live.watch(streams)
            for _ in range(3):
                y1, y2 = chain(*streams)
                alive = live.alive(without=known)
                torch.autograd.grad(y1.sum(), streams[0])  # y2 is not used
                del y1, y2
                assert live.alive(without=known) == 0
                assert alive == kept * streams[0].nbytes  # of w[1] to w[4], the last two of which are the outputs
    finally:
        gc.enable()


@pytest.mark.parametrize("training", [True, False])
def test_no_grad_keeps_nothing_and_leaves_no_graph(training, chain_of, streams):
    chain = chain_of(4).train(training)
    with torch.no_grad(), LiveBytes() as live:
        known = live.watch([*streams, *chain.parameters()])
        y1, y2 = chain(*streams)
        assert live.alive(without=known) == y1.nbytes + y2.nbytes
    assert y1.grad_fn is None


def mutating(w):
    t = w.tanh()
    s = t.sin()  # saves t
    t.mul_(2)
    return s + t


class Function(nn.Module):
    """A step made of a plain function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


def test_a_saved_tensor_changed_inside_the_step_is_refused(streams):
    chain = ReversibleChain([Function(torch.tanh), Function(mutating)])
    y1, y2 = chain(*streams)
    with pytest.raises(RecoveryError, match=r"steps\.1 modifies a tensor \(3, 6\) in place that its gradient needs"):
        (y1 * y2).sum().backward()


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_parameters_replaced_between_forward_and_backward_are_refused(mode, chain_of, streams):
    chain = chain_of(2)
    chain.schedule = mode
    others = {key: p * 2 for key, p in chain.named_parameters()}
    y1, y2 = torch.func.functional_call(chain, others, streams)
    with pytest.raises(
        RecoveryError, match=r"of steps\.1 was another tensor or module in forward, as under torch\.func\.functional_call"
    ):
        (y1 * y2).sum().backward()


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_a_side_input_changed_in_place_is_refused(mode, streams):
    chain = ReversibleChain([Function(lambda w, side: w.tanh() * side["mask"])] * 2)
    chain.schedule = mode
    side = {"mask": torch.ones(6).double()}
    y1, y2 = chain(*streams, side=side)
    side["mask"].zero_()
    with pytest.raises(RecoveryError, match=r"'side input' of steps\.1 was changed in place between forward and backward"):
        (y1 * y2).sum().backward()


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_eval_between_forward_and_backward_changes_nothing(mode, streams, error):
    chain = ReversibleChain([nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Dropout(0.5)) for _ in range(3)]).double()

    def run(schedule):
        chain.train()
        chain.schedule = schedule
        torch.manual_seed(2)
        y1, y2 = chain(*streams)
        chain.eval()
        grads = list(torch.autograd.grad((y1 * y2).sum(), [*streams, *chain.parameters()]))
        assert not any(module.training for module in chain.modules())
        return grads

    assert error(run(mode), run("store")) < 1e-12


class Force(nn.Module):
    """The gradient of an energy, as in networks of molecules, and Hamiltonian ones."""

    def __init__(self, detaches: bool):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.detaches = detaches

    def forward(self, w):
        x = w.detach().requires_grad_() if self.detaches else w
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force + w


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
@pytest.mark.parametrize("compares", [True, False])
def test_a_step_may_differentiate_inside_its_forward(mode, detaches, compares, streams, error):
    chain = ReversibleChain([Force(detaches) for _ in range(3)]).double()
    wanted = [*streams, *chain.parameters()]

    def run(mode):
        chain.schedule = mode
        y1, y2 = chain(*streams)
        return torch.autograd.grad((y1.sin() * y2).sum(), wanted, allow_unused=True)

    expected = [g for g in run("store") if g is not None]
    with set_tripwire(compares):
        for _ in range(4):
            assert error([g for g in run(mode) if g is not None], expected) < 1e-12


def chain_with(coupling: object, count: int = 1, **options: object) -> ReversibleChain:
    return ReversibleChain([nn.Identity()] * count, coupling, **options)


def shorten() -> ReversibleChain:
    chain = chain_with("additive", 2)
    del chain.steps[0]
    return chain


ONE = torch.ones(1)
REFUSALS = [
    (lambda: ReversibleChain([]), "A chain needs at least one step"),
    (lambda: chain_with("additive", exact="no"), "exact is True or False. Received: 'no'"),
    (lambda: chain_with(["additive"]), r"a list of Couplings, one per step. Received: \['additive'\]"),
    (lambda: chain_with("additive")(None, ONE), "A chain takes two tensors. Received: NoneType and Tensor"),
    (lambda: chain_with("additive")(ONE, ONE.double()), "torch.float32 on cpu and torch.float64 on cpu"),
    (lambda: shorten()(ONE, ONE), "This chain was made of 2 steps. Received: 1"),
    (lambda: setattr(shorten(), "schedule", 3), "A schedule is a mode .* or a list of modes. Received: 3"),
    (lambda: setattr(chain_with("additive", 2), "schedule", ["store"] * 3), "one mode for each of 2 units. Received: 3"),
    (
        lambda: setattr(chain_with("additive", 2), "schedule", ["store", "inverse"]),
        "Received: 'inverse'. Did you mean 'invert'",
    ),
    (lambda: ReversibleChain([nn.Identity(), lambda x: x]), "Step 1 must be a torch.nn.Module. Received: function"),
    (lambda: chain_with("aditive"), "Unknown coupling 'aditive'. Did you mean 'additive'?"),
    (lambda: Coupling(1, 0.3, 1, kept_bits=2), r"kept for \|b\| = 2\^-kept_bits, .* Received: b = 0.3 and kept_bits = 2"),
    (lambda: chain_with(Coupling(1, 0, 1))(ONE, ONE), r"steps\.0 cannot be inverted: with b = 0 it forgets"),
    (lambda: chain_with(Coupling(1, 0, 1)).inverse(ONE, ONE), "b = 0 has no inverse"),
    (lambda: chain_with(Coupling(1, 0.5, 1, kept_bits=1)).inverse(ONE, ONE), "needs the bits that forward kept"),
    (lambda: chain_with([Coupling(1, 0.5, 1, kept_bits=1), Coupling(1, 0.3, 1)], 2), r"needs \|b\| = 1, or .* b = 0.3"),
    (lambda: chain_with("momentum", exact=True), r"Exact arithmetic needs \|b\| = 1, or .* b = -0.9. Use kept_bits"),
    (lambda: chain_with([Coupling(0, 1, 1)], 2), "One coupling for each of 2 steps is needed. Received: 1"),
    (lambda: ReversibleChain([nn.Linear(3, 1)])(*torch.ones(2, 2, 3)), r"steps\.0 must return .* \(2, 3\). Received: \(2, 1\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSALS, ids=lambda each: each if isinstance(each, str) else "")
def test_refusals_say_what_to_type(make, message):
    with pytest.raises(RevzooError, match=message):
        make()


@pytest.mark.parametrize("mode", ["store", "selective", "recompute", "invert"])
def test_a_step_that_changes_its_input_is_refused(mode, streams):
    chain = ReversibleChain([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))] * 2).double()
    chain.schedule = mode
    with pytest.raises(InputError, match=r"steps\.0 changes its input in place, .* ReLU\(inplace=True\)"):
        chain(*(x * 2 for x in streams))


def test_leaving_the_grid_is_refused(streams):
    class Explode(nn.Module):
        def forward(self, w):
            return w * 1e9

    chain = ReversibleChain([Explode(), Explode()], exact=True)
    with pytest.raises(RecoveryError, match=r"states below 2\.09715e\+06 in magnitude. Received: "):
        chain(*streams)
    with pytest.raises(RecoveryError, match=r"states below 256 in magnitude. Received: nan"), torch.no_grad():
        chain(torch.full((1,), torch.nan), torch.ones(1))
    with pytest.raises(InputError, match=r"float32 or float64 streams. Received: torch\.bfloat16"):
        chain(torch.ones(1).bfloat16(), torch.ones(1).bfloat16())


def test_half_precision_streams_warn_once_with_the_drift(chain_of):
    chain = chain_of(7, dtype=torch.bfloat16)
    x1, x2 = torch.randn(2, 3, 6, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"torch\.bfloat16: inverting these 7 steps loses about 5\.5e-02 of the state"):
        chain(x1, x2)
    chain(x1, x2)  # a second warning would be an error


class Failing(nn.Module):
    """Runs out of memory after its linear layer, and remembers whether what that has returned lives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(8, 8), list[weakref.ref[torch.UntypedStorage]]()

    def forward(self, w: Tensor) -> Tensor:
        hidden = self.linear(w).tanh()
        self.held.append(weakref.ref(hidden.untyped_storage()))
        raise torch.OutOfMemoryError(f"no memory after {hidden.sin()[0, 0]}")


class Refused(Failing):
    """Changes a buffer of its own, which is refused after its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        hidden = self.linear(w).tanh()
        self.held.append(weakref.ref(hidden.untyped_storage()))
        self.calls += 1
        return hidden.sin()


@pytest.mark.parametrize("mode", ["selective", "recompute", "invert"])
def test_a_forward_that_is_refused_leaves_nothing_behind(mode):
    refused = Refused()
    chain = ReversibleChain([nn.Linear(8, 8), refused])
    chain.schedule = mode
    gc.disable()
    try:
        with pytest.raises(RecoveryError, match=r"steps\.1 changes its 'calls'"):
            chain(*torch.randn(2, 4, 8))
        assert refused.held[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["store", "selective", "recompute", "invert"])
def test_a_forward_that_fails_leaves_nothing_behind(mode):
    failing = Failing()
    chain = ReversibleChain([nn.Linear(8, 8), failing])
    chain.schedule = mode
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                chain(*torch.randn(2, 4, 8))
        assert [ref() for ref in failing.held] == [None] * 3
    finally:
        gc.enable()
