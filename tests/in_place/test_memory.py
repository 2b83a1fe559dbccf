"""What reversible blocks keep and peak at: as the report says, as counted before, and with every schedule."""

import copy
import gc

import pytest
import torch

import revzoo
from revzoo.analysis.step_memory import measure_modes
from revzoo.runtime import LiveBytes
from tests.in_place.networks import NETWORKS, SPLIT, TEXT, Tanh, Toy, X, count_bytes, llama, switch_checkpointing


@pytest.mark.parametrize(
    ("dtype", "bits", "split"),
    [(torch.float64, 8, None), (torch.float32, 4, None), (torch.bfloat16, 12, None), (torch.float32, 8, SPLIT)],
)
def test_each_step_keeps_its_bits_alone_and_the_report_says_so(dtype, bits, split):
    sizes, said = {}, {}
    for layers in (4, 8):
        model = llama(layers).to(dtype)
        report = revzoo.reversible_(model, batch=TEXT, kept_bits=bits, split=split)
        sizes[layers] = count_bytes(model, TEXT)
        (said[layers],) = report.kept_bytes_per_element
    elements, steps = 2 * 12 * 32, 4 if split is None else 8
    assert [b - a for a, b in zip(sizes[4], sizes[8], strict=True)] == 2 * [steps * elements * bits // 8]  # kept, and the peak
    assert said[8] - said[4] == steps * bits / 8
    assert said[4] == 2 * (8 if dtype is torch.float64 else 4) + (steps - 1) * bits / 8
    stored = "64 in float64" if dtype is torch.float64 else "32 in float32, 16 in half precision"
    assert f"(their inputs alone would be {stored})" in str(report)


@pytest.mark.parametrize("run", ["with values", "without", "without, and the network asks for one"])
def test_the_report_counts_a_step_as_it_was_checkpointed_and_as_it_is(run, monkeypatch):
    """The network's own checkpointing has the same peak as that which is counted."""
    model = llama(6).train()
    if run != "with values":
        monkeypatch.setattr("revzoo.in_place.reversible.FEW_FLOPS", 0)
    if "asks" in run:
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: print(int(args[0].max())))
    batch = {"input_ids": torch.arange(128).reshape(8, 16) % 20}
    stored = revzoo.measure_memory(model, batch)
    switch_checkpointing(model, "enable")
    checkpointed = revzoo.measure_memory(model, batch)
    switch_checkpointing(model, "disable")
    own = [vars(module).get("forward") for module in model.modules()]
    peaks = revzoo.reversible_(model.eval(), batch=batch).peaks
    assert not any(module.training for module in model.modules())
    assert (peaks.stored, peaks.checkpointed) == (stored, checkpointed)
    assert peaks.reversible == revzoo.measure_memory(model.train(), batch)
    revzoo.ordinary_(model)
    assert [vars(module).get("forward") for module in model.modules()] == own


def test_a_larger_batch_or_a_plan_is_advised_where_nothing_is_gained():
    model = llama(12)
    few, many = ({"input_ids": torch.ones(examples, 16, dtype=torch.long)} for examples in (1, 64))
    assert "weights and their gradients are most of the peak. A larger batch" in str(revzoo.reversible_(model, batch=few).peaks)
    revzoo.ordinary_(model)
    assert revzoo.reversible_(model, batch=many).peaks.is_worth_it
    shallow = revzoo.reversible_(llama(2), batch=many).peaks
    assert "Not worth it on this batch" in str(shallow)
    assert "revzoo.plan of the ordinary network" in str(shallow)
    assert "split= holds half a block at a time, tiles=8 an eighth" in str(shallow)
    for options in ({"split": SPLIT}, {"tiles": 8}):
        assert revzoo.reversible_(llama(2), batch=many, **options).peaks.reversible.peak_bytes < shallow.reversible.peak_bytes


@pytest.mark.parametrize("last", ["store", "recompute"])
def test_inverted_blocks_in_front_of_others_keep_their_bits_alone(last):
    kept = {}
    for layers in (4, 8):
        model = llama(layers)
        chain = revzoo.reversible_(model).chains[0]
        chain.schedule = ["invert"] * (layers - 2) + [last] * 2
        kept[layers] = count_bytes(model, TEXT)[0]
    assert kept[8] - kept[4] == 4 * 2 * 12 * 32


@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective", "store"])
def test_a_backward_frees_everything_without_the_garbage_collector(schedule):
    toy = Toy()
    revzoo.reversible_(toy).chains[0].schedule = schedule
    live = LiveBytes()
    known = live.watch([*toy.parameters(), X])
    gc.disable()
    try:
        with live:
            toy(X).sum().backward()
            known |= live.watch([p.grad for p in toy.parameters()])
            assert live.alive(without=known, at=live.now()) == 0
    finally:
        gc.enable()


def test_verify_compares_every_step():
    make, path, batch = NETWORKS["bert"]
    model = make()
    report = revzoo.reversible_(model, path)
    verified = revzoo.verify(model, batch)
    assert verified.ok
    assert verified.identical
    assert verified.reconstruction_errors == dict.fromkeys(report.chains[0].names, 0.0)


def test_verify_names_the_step_that_is_not_repeatable():
    class Counted(Tanh):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return x + self.layer(x).tanh() / Counted.calls

    toy = Toy(Tanh(), Counted(), Tanh())
    revzoo.reversible_(toy, "blocks")
    report = revzoo.verify(toy, X)
    assert not report.ok
    assert "blocks.1" in str(report)


def test_measured_memory_is_that_of_the_schedule():
    toy = Toy()
    chain = revzoo.reversible_(toy).chains[0]
    reports, current = measure_modes(toy, X)
    assert current == "invert"
    for mode, report in reports.items():
        chain.schedule = mode
        assert revzoo.measure_memory(toy, X) == report
    assert len({report.after_forward_bytes for report in reports.values()}) == 3  # a block is one product: selective is store


def test_checkpointing_keeps_more_than_reversible_blocks():
    model = llama(use_cache=False)
    stored = revzoo.measure_memory(model, TEXT).after_forward_bytes
    revzoo.reversible_(model)
    kept = revzoo.measure_memory(model, TEXT).after_forward_bytes
    revzoo.ordinary_(model)
    switch_checkpointing(model, "enable")
    assert stored > revzoo.measure_memory(model, TEXT).after_forward_bytes > kept


def test_code_between_blocks_is_reported():
    class Scaled(Toy):
        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x * 1.5 if i % 2 else x)
            return self.head(x)

    report = revzoo.reversible_(Scaled(), batch=X)
    assert report.restarts == ("blocks.1", "blocks.3")
    assert "2 of 4 blocks begin a chain of their own, with two more states: blocks.1, blocks.3." in str(report)
    assert revzoo.reversible_(Toy(), batch=X).restarts == ()


def test_blocks_can_be_copied_whose_network_is_gone():
    toy = Toy()
    revzoo.reversible_(toy)
    blocks = toy.blocks
    del toy
    for copied in (copy.deepcopy(blocks), copy.deepcopy(copy.deepcopy(blocks[:1]))):
        assert torch.equal(copied[0](X), blocks[0](X))
