"""Thirty-five things that a training script does, each compared with plain autograd on the same weights and inputs."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from comparison.method import Method
from comparison.net import Net
from comparison.trial import BLOCKS, Check, Scenario, Trial, compare, like_plain
from revzoo.runtime.live_bytes import LiveBytes

DROPOUT = 0.1


def run_step(trial: Trial) -> list[Tensor | None]:
    """Run one training step."""
    return trial.step()


def differentiate_own_forward(method: Method, net: Net) -> str:
    """Compare the gradient along a random direction with the difference of two forwards with the same dropout masks."""
    trial = Trial(method, net, dropout=DROPOUT)
    torch.manual_seed(3)
    trial.step()
    directions = [torch.randn(p.shape, dtype=p.dtype) for p in trial.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(trial.parameters(), directions, strict=True) if p.grad is not None)
    losses, size = [], 1e-6
    for sign in (1, -2):  # from the start to one side, and then to the other
        with torch.no_grad():
            for p, d in zip(trial.parameters(), directions, strict=True):
                p.add_(d, alpha=sign * size)
        torch.manual_seed(3)
        losses.append(float(trial.loss(trial(trial.make_inputs())).detach()))
    return compare([torch.tensor(slope)], [torch.tensor((losses[0] - losses[1]) / (2 * size))], 1e-4)


def leave_generator(trial: Trial) -> list[Tensor | None]:
    """Run a step and return the state of the random generator."""
    trial.step()
    return [torch.get_rng_state()]


def update_statistics(trial: Trial) -> list[Tensor | None]:
    """Run a step and return the buffers, which only BatchNorm has."""
    trial.step()
    buffers: list[Tensor | None] = [b for step in trial.steps for b in step.buffers()]
    return buffers or [torch.ones(())]


def autocast_forward(method: Method, net: Net) -> str:
    """Run forward under autocast, backward outside: functions have to run again in the same precision."""
    dtypes: list[torch.dtype] = []

    def forward_only(trial: Trial) -> list[Tensor | None]:
        dtypes.clear()  # of runs while the network was made
        with torch.autocast("cpu", torch.bfloat16):
            loss = trial.loss(trial())
        loss.backward()
        return trial.gradients()

    def record(steps: list[nn.Module]) -> list[nn.Module]:
        return [_Recording(step, dtypes) for step in steps]

    problem = like_plain(forward_only, 2e-2, dtype=torch.float32, change=record)(method, net)
    other = [dtype for dtype in dict.fromkeys(dtypes) if dtype != torch.bfloat16]
    return problem or (f"functions ran in {other[0]}" if other else "")


def autocast_both(trial: Trial) -> list[Tensor | None]:
    """Run forward and backward under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return trial.step()


def ask_for_gradients(trial: Trial) -> list[Tensor | None]:
    """Return `torch.autograd.grad` of the parameters."""
    return list(torch.autograd.grad(trial.loss(trial()), trial.parameters()))


def fire_parameter_hooks(method: Method, net: Net) -> str:
    """Count how often the two kinds of hooks on parameters fire."""
    trial, fired = Trial(method, net), []
    for p in trial.parameters():
        p.register_hook(lambda _: fired.append("gradient hook"))
        p.register_post_accumulate_grad_hook(lambda _: fired.append("post-accumulate hook"))
    trial.step()
    number = len(trial.parameters())
    counts = {kind: fired.count(kind) / number for kind in ("gradient hook", "post-accumulate hook")}
    return ", ".join(f"{kind}: {count:g} times" for kind, count in counts.items() if count != 1)


def fire_module_hooks(method: Method, net: Net) -> str:
    """See whether forward hooks and full backward hooks on every F and G fire."""
    trial, fired = Trial(method, net), set()
    for i, step in enumerate(trial.steps):
        step.register_forward_hook(lambda *_, i=i: fired.add(("forward", i)))
        step.register_full_backward_hook(lambda *_, i=i: fired.add(("backward", i)))
    trial.step()
    missing = 2 * len(trial.steps) - len(fired)
    return f"{missing} of {2 * len(trial.steps)} hooks do not fire" if missing else ""


def accumulate(trial: Trial) -> list[Tensor | None]:
    """Run two batches one after another."""
    for seed in (1, 2):
        trial.loss(trial(trial.make_inputs(seed)), seed).backward()
    return trial.gradients()


def backward_after_two_forwards(trial: Trial) -> list[Tensor | None]:
    """Run two forwards, then backward of each."""
    losses = [trial.loss(trial(trial.make_inputs(seed)), seed) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    return trial.gradients()


def backward_of_sum(trial: Trial) -> list[Tensor | None]:
    """Run two forwards and one backward of the sum of their losses."""
    losses = [trial.loss(trial(trial.make_inputs(seed)), seed) for seed in (1, 2)]
    (losses[0] + losses[1]).backward()
    return trial.gradients()


@torch.no_grad()
def infer(trial: Trial) -> list[Tensor | None]:
    """Return the outputs without gradients, in training and in eval mode."""
    outputs: list[Tensor | None] = []
    for mode in (True, False):
        trial.module.train(mode)
        outputs += trial(trial.make_inputs())
    return outputs


def step_in_eval_mode(trial: Trial) -> list[Tensor | None]:
    """Run a step in eval mode."""
    trial.module.eval()
    return trial.step()


def step_of_copies(duplicate: Callable[[nn.Module], nn.Module]) -> Scenario:
    """Return a scenario that copies a network before and after a step, and runs a step of each copy."""

    def scenario(trial: Trial) -> list[Tensor | None]:
        names = {p: name for name, p in trial.module.named_parameters()}
        results: list[Tensor | None] = []
        for _ in range(2):
            module = duplicate(trial.module)
            outputs = trial.method.split(trial.net, module(*trial.make_inputs()))
            trial.loss(outputs).backward()
            results += [module.get_parameter(names[p]).grad for p in trial.parameters()]
            trial.step()
            for p in trial.parameters():
                p.grad = None
        return results

    return scenario


def save_and_load(module: nn.Module) -> nn.Module:
    """Return the module after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def name_tensors(method: Method, net: Net) -> str:
    """Compare the keys of the state with the tensors of the steps, before and after a step."""
    trial = Trial(method, net)
    number = sum(len(step.state_dict()) for step in trial.steps)
    before = list(trial.module.state_dict())
    trial.step()
    if len(before) != number:
        return f"{len(before)} keys for {number} tensors"
    return "" if list(trial.module.state_dict()) == before else "other keys after a step"


def step_without_input_gradients(trial: Trial) -> list[Tensor | None]:
    """Run a step on inputs that require no gradient."""
    trial.inputs = tuple(t.detach() for t in trial.inputs)
    return trial.step()


def freeze_some(steps: list[nn.Module]) -> list[nn.Module]:
    """Freeze the F of the first block and the G of the last one."""
    for step in (steps[0], steps[-1]):
        step.requires_grad_(False)
    return steps


def step_twice_through(trial: Trial) -> list[Tensor | None]:
    """Run backward twice through one forward."""
    loss = trial.loss(trial())
    loss.backward(retain_graph=True)
    loss.backward()
    return trial.gradients()


def differentiate_twice(trial: Trial) -> list[Tensor | None]:
    """Run backward of the squared gradients of the inputs."""
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        first = torch.autograd.grad(trial.loss(trial()), trial.inputs, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        total.backward()
    return [p.grad for p in trial.parameters()]


def use_second_stream(trial: Trial) -> list[Tensor | None]:
    """Run a step whose loss depends on the second stream only."""
    trial()[1].square().sum().backward()
    return trial.gradients()


def leave_inputs_and_outputs(method: Method, net: Net) -> str:
    """Compare the inputs with copies after forward, and the outputs with copies after backward."""
    trial = Trial(method, net)
    copies = [t.detach().clone() for t in trial.inputs]
    outputs = trial()
    if not all(t.untyped_storage().nbytes() and torch.equal(t, c) for t, c in zip(trial.inputs, copies, strict=True)):
        return "the input is gone after forward"
    copies = [y.detach().clone() for y in outputs]
    trial.loss(outputs).backward()
    return "" if all(map(torch.equal, outputs, copies)) else "backward changes the outputs"


def stand_between(trial: Trial) -> list[Tensor | None]:
    """Run the network after an operation that saves its result, and before one that saves its input."""
    outputs = trial([(0.1 * t).exp() for t in trial.inputs])
    trial.loss((outputs[0].tanh(), outputs[1].tanh())).backward()
    given = tuple(t.grad for t in trial.inputs if t.grad is not None)
    return [*trial.gradients(), *trial.method.split(trial.net, given)]


def release(method: Method, net: Net) -> str:
    """Count what is alive after a step, and after a forward alone, without waiting for the garbage collector."""
    trial = Trial(method, net)
    trial.step()
    left = {}
    gc.collect()
    gc.disable()
    try:
        for name in ("a step", "a forward alone"):
            live = LiveBytes()
            with live:
                own = live.watch(trial.module.parameters()) | live.watch(trial.module.buffers())
                inputs = trial.make_inputs()
                own |= live.watch(inputs)
                outputs = trial(inputs)
                if name == "a step":
                    trial.loss(outputs).backward()
                del outputs
                own |= live.watch(p.grad for p in trial.parameters()) | live.watch(t.grad for t in inputs)
                own |= live.watch(inputs)
                left[name] = live.alive(without=own)
    finally:
        gc.enable()
    return ", ".join(f"{size} bytes left after {name}" for name, size in left.items() if size > 0)


def compile_steps(steps: list[nn.Module]) -> list[nn.Module]:
    """Compile every F and G by itself."""
    return [cast(nn.Module, torch.compile(step)) for step in steps]


def compile_whole(trial: Trial) -> list[Tensor | None]:
    """Compile the network."""
    trial.module = cast(nn.Module, torch.compile(trial.module, backend="aot_eager"))
    return trial.step()


class _Recording(nn.Module):
    """A step that records the dtypes of its results."""

    def __init__(self, step: nn.Module, dtypes: list[torch.dtype]):
        super().__init__()
        self.step = step
        self.dtypes = dtypes

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.step(x)
        self.dtypes.append(out.dtype)
        return out


CHECKS = (
    Check("gradients in float64", like_plain(run_step)),
    Check("gradients in float32", like_plain(run_step, 1e-4, dtype=torch.float32)),
    Check("dropout: gradients with the same seed", like_plain(run_step, dropout=DROPOUT)),
    Check("dropout: gradient of its own forward", differentiate_own_forward),
    Check("dropout: random generator left where plain autograd leaves it", like_plain(leave_generator, 0, dropout=DROPOUT)),
    Check("BatchNorm: statistics updated once", like_plain(update_statistics)),
    Check("autocast around forward: run again in bfloat16", autocast_forward),
    Check("autocast around forward and backward", like_plain(autocast_both, 2e-2, dtype=torch.float32)),
    Check("torch.autograd.grad of the parameters", like_plain(ask_for_gradients)),
    Check("hooks on parameters fire once", fire_parameter_hooks),
    Check("hooks on F and G fire", fire_module_hooks),
    Check("gradient accumulation", like_plain(accumulate)),
    Check("two forwards, then two backwards", like_plain(backward_after_two_forwards)),
    Check("the same with dropout", like_plain(backward_after_two_forwards, dropout=DROPOUT)),
    Check("two forwards, one backward of the sum", like_plain(backward_of_sum)),
    Check("no_grad in training and eval mode", like_plain(infer, 1e-12)),
    Check("eval mode with gradients", like_plain(step_in_eval_mode)),
    Check("copy.deepcopy, fresh and after a step", like_plain(step_of_copies(copy.deepcopy))),
    Check("pickle, fresh and after a step", like_plain(step_of_copies(lambda module: pickle.loads(pickle.dumps(module))))),
    Check("torch.save and torch.load", like_plain(step_of_copies(save_and_load))),
    Check("state_dict: one key for a tensor", name_tensors),
    Check("inputs that require no gradient", like_plain(step_without_input_gradients)),
    Check("some F and G frozen", like_plain(run_step, change=freeze_some)),
    Check("the same F and G in every block", like_plain(run_step, change=lambda steps: steps[:2] * BLOCKS)),
    Check("backward twice with retain_graph", like_plain(step_twice_through)),
    Check("double backward with create_graph", like_plain(differentiate_twice)),
    Check("loss of the second stream only", like_plain(use_second_stream)),
    Check("input left after forward, outputs after backward", leave_inputs_and_outputs),
    Check("between operations that save", like_plain(stand_between)),
    Check("nothing left alive after a step, or a forward alone", release),
    Check("torch.compile of every F and G", like_plain(run_step, 1e-4, dtype=torch.float32, change=compile_steps), True),
    Check("torch.compile of the network", like_plain(compile_whole), True),
)
