"""Training on texts: runs, their evaluation, and the heads that data require."""

import pytest
import torch
from transformers import BertConfig, BertModel

import revzoo
from revzoo.checkpoint import files
from revzoo.data.base import IGNORED
from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions, TextOptions
from revzoo.errors import CheckpointError, InputError, RevzooError
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import resume, train
from revzoo.training.loss import Loss
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder
from tests.training.runs import assert_same_run, interrupted

SMALL = "stem.width=16,block.f.heads=2,stages.0.width=16,stages.0.depth=1"
FAST = ["train.epochs=2", "train.accumulate=2", "schedule.warmup_epochs=0"]


@pytest.mark.parametrize("name", ["masked_lm", "text_classification"])
def test_a_batch_of_different_lengths_is_each_text_alone(name, tables, tokenizer):
    """Padding is seen by nothing: logits and the loss of a batch are those of its texts one by one."""
    model_name = "rev_roberta_mini" if name == "masked_lm" else "rev_bert_mini"
    sizes = ["input.length=48", "input.vocabulary=280", "input.padding=1"]
    torch.manual_seed(0)
    model = revzoo.create(model_name, overrides=[*SMALL.split(","), *sizes], dtype=torch.float64).eval()
    options = DataOptions(name, 4, str(tables), text=TextOptions(str(tokenizer)))
    loss, checked = Loss(0.1), 0
    for ids, labels in load_data(options, model.spec.input, 0).train:
        lengths = (ids != 1).sum(1)
        assert (ids[torch.arange(48)[: ids.shape[1]] >= lengths[:, None]] == 1).all()
        assert ids.shape[1] == lengths.max()  # no longer than the longest
        checked += int(lengths.min() < lengths.max())
        logits = model(ids)
        total = weight = 0.0
        for i, n in enumerate(lengths.tolist()):
            alone = model(ids[i : i + 1, :n])
            label = labels[i : i + 1, :n] if labels.dim() == 2 else labels[i : i + 1]
            torch.testing.assert_close(logits[i : i + 1, :n] if labels.dim() == 2 else logits[i : i + 1], alone)
            count = int((label != IGNORED).sum())
            total += count * loss(alone, label)
            weight += count
        torch.testing.assert_close(loss(logits, labels), total / weight)
    assert checked


@pytest.fixture
def small_recipe(causal, story, tables, tokenizer):
    """Return a function that makes a shipped recipe small, on little data."""

    def make(kind, *overrides):
        if kind == "causal_lm":
            model = [f"model.name={causal}", "model.overrides=[]"]
            return load_recipe("text_reformer", [*FAST, *model, f"data.root={story}", "data.batch_size=8", *overrides])
        name = "text_roberta" if kind == "masked_lm" else "text_bert"
        model = [f"model.overrides=[{SMALL},input.length=48,input.vocabulary=280,input.padding=1]"]
        data = [f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
        return load_recipe(name, [*FAST, *model, *data, *overrides])

    return make


@pytest.mark.parametrize("kind", ["causal_lm", "masked_lm", "text_classification"])
def test_a_run_is_resumed_and_evaluated(kind, tmp_path, small_recipe, tokenizer, monkeypatch, capsys):
    options = small_recipe(kind)
    train(options, tmp_path / "whole")
    out, err = capsys.readouterr()
    assert ("perplexity" in out) == (kind != "text_classification")
    assert ("bits per byte" in out, " bytes/s" in out) == ((kind == "causal_lm",) * 2)
    assert err == ""
    with interrupted(2):
        train(options, tmp_path / "cut")
    tokenizer.unlink()  # the run has its own copy
    monkeypatch.chdir("/")
    resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    *_, record = records = RunFolder(tmp_path / "cut").read_records()
    assert len(records) == 2
    scores = evaluate_checkpoint(tmp_path / "cut" / "last.safetensors", ["data.batch_size=3"])
    assert scores.loss == pytest.approx(record["loss"], rel=1e-5)
    assert (scores.metrics["top1"], scores.label_noun) == (
        pytest.approx(record["top1"]),
        {"causal_lm": "bytes", "masked_lm": "tokens"}.get(kind, "texts"),
    )
    spec = revzoo.load_spec(tmp_path / "cut")
    assert spec.head.arguments.get("outputs") == {"causal_lm": 256, "masked_lm": None, "text_classification": 2}[kind]


def test_a_run_is_not_evaluated_on_other_classes(tmp_path, tables, small_recipe):
    train(small_recipe("text_classification", "train.epochs=1"), tmp_path / "run")
    other = tables / "other.csv"
    other.write_text("text,label\n" + "a cat,cow\na dog,pig\n" * 10)
    with pytest.raises(InputError, match=r"trained on these 2 classes: cat, dog\. Received: data of 2 classes: cow, pig\."):
        evaluate_checkpoint(tmp_path / "run", [f"data.root={other}"])


@pytest.mark.parametrize("name", ["text_reformer", "text_roberta", "text_bert"])
def test_recipes_need_no_files(name):
    """The documentation of whichever Python this is gives each of them batches that its model takes."""
    shipped = load_recipe(name)
    outputs = [] if name != "text_bert" else ["head.outputs=4"]  # the data say it
    spec = revzoo.load_spec(shipped.model.name, [*shipped.model.overrides, *outputs])
    data = load_data(shipped.data, spec.input, 0)
    assert data.num_classes == (4 if outputs else None)
    ids, labels = next(iter(data.train))
    assert ids.shape[0] == labels.shape[0] == shipped.data.batch_size
    assert ids.max() < spec.input.vocabulary


def test_models_that_do_not_fit_are_refused_before_there_is_a_folder(tmp_path, causal, story):
    model = [f"model.name={causal}", "model.overrides=[]", f"data.root={story}", "data.batch_size=8"]
    for name, overrides, message in (
        ("text_roberta", ["data.name=text_classification"], "needs a model that predicts one class for a text"),
        ("text_reformer", [*model, "model.num_outputs=255"], "model.num_outputs: found 255; allowed: at least 256, the vocab"),
        ("text_roberta", ["model.num_outputs=300"], "scores the 260 ids of its vocabulary. Received: 300 outputs."),
    ):
        with pytest.raises(RevzooError, match=message):
            train(load_recipe(name, overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_too_few_outputs_for_the_vocabulary(tmp_path, small_recipe):
    train(small_recipe("causal_lm", "train.epochs=1"), tmp_path / "run")
    model = revzoo.create(tmp_path / "run", num_outputs=200)
    facts = files.read_metadata(tmp_path / "run" / "best.safetensors")
    files.save_weights(model, tmp_path / "run" / "few.safetensors", {"revzoo.recipe": facts["revzoo.recipe"]})
    with pytest.raises(RevzooError, match="causal has 200 outputs, too few for the 256 ids of its vocabulary"):
        evaluate_checkpoint(tmp_path / "run" / "few.safetensors")


def test_fine_tuning_with_a_head_that_the_data_complete(tmp_path, tables, tokenizer):
    """An override that sets a head leaves its outputs to the data, with weights to start from as well."""
    sizes = f"{SMALL},input.length=48,input.vocabulary=280,input.padding=1"
    model = f"model.overrides=[{sizes},'head={{type: pooled_linear}}']"
    data = [f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
    short = [*FAST, "train.epochs=1"]
    train(load_recipe("text_bert", [*short, *data, model]), tmp_path / "run")
    start = f"model.checkpoint={tmp_path}/run/last.safetensors"
    train(
        load_recipe("text_bert", [*short, *data, model, start, "optimizer.lr=1e-12", "schedule.sched=constant"]),
        tmp_path / "tuned",
    )
    before, after = (files.read_tensors(tmp_path / run / "last.safetensors") for run in ("run", "tuned"))
    for key in before:
        torch.testing.assert_close(before[key], after[key], rtol=0, atol=1e-6)


def test_features_are_no_classes_and_a_head_can_be_put_on_a_folder(tmp_path, tables, tokenizer, caplog):
    """Of a converted text encoder without a head for classes."""
    sizes = {"vocab_size": 280, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = tmp_path / "rev"
    revzoo.convert(BertModel(BertConfig(**sizes, max_position_embeddings=48, pad_token_id=1)).eval(), out=encoder)
    data = ["data.name=text_classification", f"data.root={tables}", f"data.text.tokenizer={tokenizer}", "data.batch_size=4"]
    typed = [f"model={encoder}", *data, "train.epochs=1", "schedule.warmup_epochs=0", "data.num_workers=0"]
    with pytest.raises(RevzooError, match="the head text_features, which returns 16 features and predicts nothing"):
        train(load_recipe("finetune", typed), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    head = "head={type: sequence_classification, dropout: 0.1}"
    with pytest.raises(CheckpointError, match="1 of another shape: stem.position_embeddings.weight"):  # the rest stays strict
        revzoo.create(encoder, overrides=[head, "head.outputs=3", "input.length=20"])
    still = ["optimizer.lr=1e-12", "schedule.min_lr=0"]
    train(load_recipe("finetune", [*typed, f"model.overrides=['{head}']", *still]), tmp_path / "run")
    assert "now, not text_features. Initialised at random: head.out_proj.weight, head.out_proj.bias." in caplog.text
    before, after = revzoo.create(encoder).state_dict(), files.read_tensors(tmp_path / "run" / "last.safetensors")
    assert after["head.out_proj.weight"].shape == (2, 16)
    assert after.keys() - before.keys() == {"head.out_proj.weight", "head.out_proj.bias"}
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=1e-6)
