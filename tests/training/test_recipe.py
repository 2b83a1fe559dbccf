import shlex

import pytest

from revzoo.errors import SpecError, UnknownNameError
from revzoo.spec import list_recipes, load_spec
from revzoo.spec.names import recipe_files
from revzoo.training.options import ModelOptions
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_check import find_ineffective_settings
from tests.training.runs import make_recipe

NEEDED = {"finetune": ["data.root=images", "model=rev_vit_digits"], "texts": ["data.root=table.csv"]}


def test_every_recipe():
    """Every shipped recipe loads, says only what has an effect, and names a model that exists."""
    assert len(list_recipes()) == 25
    for name in list_recipes():
        recipe = load_recipe(name, NEEDED.get(name, [] if name.startswith(("digits", "text_")) else ["data.root=images"]))
        assert find_ineffective_settings(recipe) == []
        assert load_spec(recipe.model.name).name == recipe.model.name


def test_a_list_of_overrides_may_have_lost_its_quotation_marks_in_a_shell():
    assert (
        load_recipe("images", ["data.root=images", "model.overrides=[input.size=32]"]).model.list_overrides()[-1]
        == "input.size=32"
    )
    recipe = load_recipe("digits", ["model.overrides=[head={type: token_linear}, input.size=[64,64]]"])
    assert recipe.model.overrides == ("head={type: token_linear}", "input.size=[64,64]")


def test_published_numbers():
    """Images per update, updates and milestones of the sources."""
    cifar, imagenet = (load_recipe(name, ["data.root=images"]) for name in ("revnet_cifar", "revnet_imagenet"))
    per_epoch = 50_000 // cifar.data.batch_size
    assert cifar.train.epochs * per_epoch == 80_000
    assert [epoch * per_epoch for epoch in cifar.schedule.decay_milestones] == [40_000, 60_000]
    per_epoch = 1_281_167 // (4 * imagenet.data.batch_size)
    assert round(imagenet.train.epochs * per_epoch, -4) == 600_000
    assert [round(epoch * per_epoch, -4) for epoch in imagenet.schedule.decay_milestones] == [160_000, 320_000, 480_000]
    small, base = (load_recipe(f"rev_vit_{size}_imagenet", ["data.root=images"]) for size in "sb")
    assert 8 * small.data.batch_size == 8 * base.data.batch_size == 512
    assert (small.optimizer.weight_decay, base.optimizer.weight_decay) == (0.05, 0.1)
    assert (small.train.clip_grad, base.train.clip_grad) == (1.0, 2.0)
    assert (small.data.augment.auto_augment, base.data.augment.auto_augment) == (
        "rand-m7-mstd0.5-inc1",
        "rand-m6-n5-mstd0.5-inc1",
    )
    assert (base.data.augment.re_prob, base.mixup.mixup_alpha, base.mixup.cutmix_alpha) == (0.25, 0.8, 1.0)
    assert small.optimizer.weight_decay_of == base.optimizer.weight_decay_of == "weights_and_positions"
    mvit, swin = (load_recipe(f"{name}_imagenet", ["data.root=images"]) for name in ("rev_mvit_b", "rev_swin"))
    assert (8 * mvit.data.batch_size, mvit.optimizer.lr, mvit.optimizer.weight_decay) == (256, 2.5e-4, 0.05)
    assert (mvit.train.epochs, mvit.schedule.warmup_epochs, mvit.train.clip_grad) == (300, 70, 1.0)
    assert mvit.data.augment.auto_augment == "rand-m9-n6-mstd0.5-inc1"
    share = 8 * swin.data.batch_size / 512  # by which the authors scale what they give for 512 images
    assert (swin.train.epochs, swin.schedule.warmup_epochs, swin.train.clip_grad) == (300, 20, 5.0)
    assert (swin.optimizer.lr, swin.schedule.warmup_lr, swin.schedule.min_lr) == (5e-4 * share, 5e-7 * share, 5e-6 * share)
    cifar, imagenet = (load_recipe(f"irevnet_{name}", ["data.root=images"]) for name in ("cifar", "imagenet"))
    assert (cifar.data.batch_size, cifar.train.epochs, cifar.schedule.decay_milestones) == (128, 200, (60, 120, 160))
    assert (cifar.schedule.decay_rate, cifar.optimizer.weight_decay) == (0.2, 5e-4)
    assert (4 * imagenet.data.batch_size, imagenet.train.epochs, imagenet.schedule.decay_epochs) == (256, 128, 32)
    assert (imagenet.schedule.decay_rate, imagenet.optimizer.weight_decay) == (0.1, 1e-4)
    assert {recipe.optimizer.weight_decay_of for recipe in (cifar, imagenet)} == {"all"}


def test_data_from_files_need_a_place():
    with pytest.raises(SpecError, match="data.root: found nothing; allowed: the folder of the data, for name: wds"):
        make_recipe("data.name=wds")
    own = make_recipe("data.name=package:function", "data.shift=2", "data.image.label=kind")  # a function may read every option
    assert (own.data.root, find_ineffective_settings(own)) == (None, [])


def test_all_problems_at_once():
    wrong = [
        "optimzer.lr=1",
        "data.name=cifar10",
        "data.batch_size=63",
        "mixup={mode: batch}",
        "model.pretrained=true",
        "model.checkpoint=a.safetensors",
        "schedule.sched=multistep",
        "train.epochs=0",
        "train.mixed_precision=yes",
    ]
    with pytest.raises(SpecError) as caught:
        load_recipe("digits", wrong)
    received = {(problem.path, problem.received) for problem in caught.value.problems}
    assert received == {
        ("optimzer", "the unknown key 'optimzer'"),
        ("data.root", "nothing"),
        ("data.batch_size", "63"),
        ("mixup", "{'mode': 'batch'}"),
        ("model.checkpoint", "'a.safetensors'"),
        ("schedule.decay_milestones", "nothing"),
        ("train.epochs", "0"),
        ("train.mixed_precision", "true"),
    }
    hints = {problem.path: problem.hint for problem in caught.value.problems}
    assert hints["optimzer"] == " Did you mean 'optimizer'?"
    assert "quote it" in hints["train.mixed_precision"]
    with pytest.raises(
        SpecError, match=r"optimizer\.opt: found 'adamww'; .* Did you mean 'adamw'"
    ):  # known to timm, asked last
        load_recipe("digits", ["optimizer.opt=adamww"])


def test_a_coupling_with_a_name_is_the_models():
    """One without is a schedule; both at once cannot be typed, as a second value replaces the first."""
    recipe = load_recipe("lm", ["model.overrides=[input.length=64]", "coupling=leapfrog"])
    assert (recipe.model.overrides, recipe.coupling) == (("input.length=64", "block.coupling=leapfrog"), None)
    typed = load_recipe("lm", ["coupling={type: midpoint, h: 0.25}"])
    spec = load_spec("rev_gpt_mini", typed.model.overrides)
    assert (spec.coupling.type, spec.coupling.arguments) == ("midpoint", {"h": 0.25})
    assert load_recipe("lm", ["coupling={m: [0.1, 0.9]}"]).coupling.m == (0.1, 0.9)


INSIDE = "train.optimizer_in_backward=true train.clip_grad=null"


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        ("optimizer.lr=.inf", "a finite number > 0"),
        ("optimizer.betas=[0.9]", "a list of 2"),
        ("data.augment.scale=[0.5,2]", r"a number in \(0, 1\]"),
        ("model.overrides=[head.outputs=3]", "no head.outputs: use model.num_outputs"),
        ("schedule='{warmup_prefix: true, warmup_epochs: 30}'", "fewer than the 30 of train.epochs: the decay follows it"),
        ("optimizer='{weight_decay_of: all, layer_decay: 0.9}'", "null with weight_decay_of: all"),
        ("optimizer.opt=adahessian", "a first-order optimizer"),
        ("optimizer.weight_decay_of=norms", "'weights' or 'weights_and_positions' or 'all'"),
        (f"{INSIDE} train.accumulate=2", "1 with train.optimizer_in_backward"),
        (f"{INSIDE} train.clip_grad=1.0", "null with train.optimizer_in_backward"),
        (f"{INSIDE} train.mixed_precision=fp16", "bf16 or 'no' with train.optimizer_in_backward"),
        (f"{INSIDE} memory.lookahead=1", "0 with train.optimizer_in_backward"),
        (f"{INSIDE} optimizer.opt=lamb", "adadelta, adagrad"),
        (f"{INSIDE} train.shard=full", "false with train.shard"),
        ("train.shard=full train.mixed_precision=fp16", "bf16 or 'no' with train.shard"),
        ("train.offload=true", "false with train.shard: none"),
        ("train.shard=full memory.budget=1GiB", "null with train.shard: model.schedule says what is kept"),
    ],
)
def test_settings_that_are_out_of_range_or_do_not_go_together(overrides, allowed):
    with pytest.raises(SpecError, match=f"1 problem found:.*\n.*allowed: .*{allowed}"):
        load_recipe("digits", shlex.split(overrides))


def test_recipes_of_earlier_versions_name_an_option_that_has_gone(tmp_path):
    (tmp_path / "config.yaml").write_text("base: digits\ntrain: {epochs: 3, cuda_graph: false}\n")
    assert load_recipe(tmp_path).train.epochs == 3
    with pytest.raises(SpecError, match=r"train\.cuda_graph"):
        load_recipe(tmp_path, ["train.cuda_graph=true"])


def test_a_checkpoint_may_have_its_own_head():
    load_recipe("digits", ["model.overrides=[head.outputs=3]", "model.checkpoint=a.safetensors"])


def test_a_setting_that_does_not_fit_is_placed_where_it_was_written(tmp_path):
    (tmp_path / "base.yaml").write_text("base: digits\ntrain: {epochs: 3}\ndata: {batch_size: 5}\n")
    (tmp_path / "mine.yaml").write_text("base: base.yaml\ndata: {batch_size: 7}\n")
    recipe = load_recipe(tmp_path / "mine.yaml", ["train.freeze=[stem]"])
    places = {
        "train.freeze": "override",
        "data.batch_size": str(tmp_path / "mine.yaml"),
        "train.epochs": str(tmp_path / "base.yaml"),
        "model.name": str(recipe_files()["digits"]),
        "train.class_weights": str(tmp_path / "mine.yaml"),  # it has its default
    }
    for path, file in places.items():
        assert str(recipe.error(path, "3", "4")).endswith(f" {file}: {path}: found 3; allowed: 4.")


def test_unknown_recipe():
    with pytest.raises(UnknownNameError, match="Unknown recipe 'digit'. Did you mean 'digits'?"):
        load_recipe("digit")


def test_settings_without_effect_are_named():
    idle = ["optimizer.momentum=0.9", "data.root=/images", "data.augment.hflip=0.1", "schedule.sched=constant"]
    assert find_ineffective_settings(make_recipe(*idle)) == [
        "data.root has no effect with digits",
        "data.augment has no effect with digits",
        "optimizer.momentum has no effect with adamw",
        "schedule.min_lr has no effect with constant",
    ]
    assert find_ineffective_settings(make_recipe("optimizer.opt=lion", "optimizer.fused=true")) == [
        "optimizer.fused has no effect with lion"
    ]
    assert find_ineffective_settings(make_recipe()) == []


def test_settings_that_contradict(tmp_path):
    with pytest.raises(SpecError) as caught:
        load_recipe("text_roberta", ["mixup={mixup_alpha: 0.8}"])
    assert [(problem.path, problem.received) for problem in caught.value.problems] == [("mixup", "{'mixup_alpha': 0.8}")]
    with pytest.raises(SpecError, match=r"data.augment.auto_augment: found 'none'; allowed: a timm policy"):
        load_recipe("text_roberta", ["data.augment.auto_augment=none"])
    idle = ["data.shift=1", "data.augment.hflip=0.1", "data.text.label=kind"]
    assert find_ineffective_settings(load_recipe("text_roberta", idle)) == [
        "data.shift has no effect with masked_lm",
        "data.augment has no effect with masked_lm",
        "data.text.label has no effect with masked_lm",
    ]
    assert find_ineffective_settings(load_recipe("digits", ["data.text.label=kind"])) == ["data.text has no effect with digits"]


@pytest.mark.parametrize(
    ("settings", "path"), [([], "model.tiles"), (["memory.budget=1GiB", "data.batch_size=auto"], "data.batch_size")]
)
def test_tiles_are_planned_with_a_budget_for_one_batch_in_one_process(settings, path):
    with pytest.raises(SpecError) as caught:
        load_recipe("digits", ["model.tiles=auto", *settings])
    assert [problem.path for problem in caught.value.problems] == [path]


def test_interpolations_that_rotations_do_not_have():
    typed = ["data.augment.interpolation=lanczos", "data.root=photos"]
    assert load_recipe("images", typed).data.augment.interpolation == "lanczos"
    with pytest.raises(SpecError, match=r"interpolation: found 'lanczos'; allowed: bicubic, .* random with auto_augment"):
        load_recipe("images", [*typed, "data.augment.auto_augment=rand-m9-mstd0.5"])


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = load_recipe("text_bert", ["data.root=rows.csv", "data.text.tokenizer=t.json"]).data
    assert (data.root, data.text.tokenizer) == (str(tmp_path / "rows.csv"), str(tmp_path / "t.json"))


def test_options_of_the_model_may_follow_its_name():
    """`model=NAME` resets the options that came before except `pretrained`, and `model.overrides=...` adds to it."""
    sizes = ["stages.0.depth=3"]
    recipe = load_recipe("digits", ["model.exact=true", "model=rev_vit_digits", f"model.overrides={sizes}"])
    assert recipe.model == ModelOptions("rev_vit_digits", overrides=("stages.0.depth=3",))
    assert load_recipe("digits", ["model.exact=true"]).model.exact
    model = ["model={name: revnet_digits, num_outputs: 7, schedule: store, pretrained: true}", "model=rev_vit_digits"]
    assert load_recipe("digits", model).model == ModelOptions("rev_vit_digits", pretrained=True)
    assert load_recipe("images", ["data.root=x", "model=rev_vit_s"]).model == ModelOptions("rev_vit_s")


def test_what_a_recipe_starts_from(tmp_path):
    """`finetune` has weights: those of a folder, those that ship, or those of a file that is typed, which goes before them."""
    root = ["data.root=images"]
    (tmp_path / "own.yaml").write_text("base: finetune\nmodel: rev_vit_digits\ndata: {root: images}")
    assert load_recipe(tmp_path / "own.yaml").model == ModelOptions("rev_vit_digits", pretrained=True)
    typed = load_recipe("finetune", [*root, "model=rev_vit_s", "model.checkpoint=a.safetensors"]).model
    assert typed == ModelOptions("rev_vit_s", checkpoint="a.safetensors")
    with pytest.raises(SpecError, match="the folder of a run .* From scratch: revzoo train images model=rev_vit_s"):
        load_recipe("finetune", [*root, "model=rev_vit_s"])
    with pytest.raises(SpecError, match="model.name: found nothing; allowed: .* such as model=runs/images"):
        load_recipe("finetune", root)
