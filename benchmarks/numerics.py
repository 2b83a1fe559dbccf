"""What rounding does to layers, networks, gradients and accuracy: the figures of two papers at this machine's size.

    python benchmarks/numerics.py                   digits: about 12 minutes on one core
    python benchmarks/numerics.py --mnist DIR       states, ratios and accuracy on MNIST, a quarter of an hour: DIR has the
                                                    four files train-images-idx3-ubyte, ...
    python benchmarks/numerics.py --quick           toy sizes, which learn nothing, in seconds

    alpha       by what factor the inverse of a layer changes the signal-to-noise ratio, measured and by formula, for
                LeakyReLU and BatchNorm (Hascoet et al. 2023, figures 6 and 5), pooling and coupled convolutions
    states      the ratio of every rebuilt state of a layer-wise and of a hybrid network (figure 10)
    ratios      the lowest ratio over depth and slope (figure 11)
    accuracy    test accuracy with stored and with rebuilt activations over depth and slope (figure 12)
    angle       angle between the gradients of stored and rebuilt activations during a training of a RevNet: float32, autocast,
                half-precision streams, exact arithmetic (Gomez et al. 2017, figure 4)

The networks are `layerwise_digits` and `revnext_digits` (hybrid) with more blocks. The tripwire, which ends a training with an
error where a rebuilt state differs by more than rounding explains, is off: the networks that it protects from are what is
shown. Accuracies are means over three seeds (one over slopes, and on MNIST), of the last update, on the test images; digits are
tested in all nine positions that differ by a pixel. Trainings of stored and of rebuilt activations start from the same weights
and see the same batches. MNIST is averaged over 2x2 pixels, to 14x14, so that a training takes minutes: on 28x28 it costs three
times as much.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from layer_alpha import measure_alpha
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from runtime import describe_environment
from torch import Tensor, nn

import revzoo
from revzoo.data.digits import load_digits
from revzoo.data.options import DataOptions
from revzoo.display.figures.base import new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, ORANGE, PALE, RED
from revzoo.runtime import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU, SpaceToBatch, SpaceToDepth, set_tripwire
from revzoo.runtime.drift import ignore_error_growth

SEEDS = (10, 11, 12)
POINTS = 0.5  # how far the accuracy of the rebuilt hybrid may be from the stored one's [percentage points]
SLOPE = 0.2  # where it is not varied
_LR, _WARM_UP, _DECAY = 5e-3, 0.1, 0.02  # largest learning rate; share of updates until it is reached; weight decay
_COLORS = {"layer-wise": ORANGE, "hybrid": BLUE}
_MEAN, _DEVIATION = 33.3, 78.6  # of MNIST's pixels, from 0 to 255
_PANELS = {"depths": ("depth", "depth"), "slopes": ("slope", "slope of LeakyReLU")}


@dataclass(frozen=True)
class Size:
    """How much is computed.

    Args:
        depths: of each network, in blocks.
        slope_depths: the depth of each network at which slopes are compared.
        slopes: of LeakyReLU.
        updates: of a training.
        angle_updates: of the training whose angle is followed.
        every: n of "the angle is measured before every n-th update".
        batch: examples in a batch.
        blocks: reversible blocks in each of the three stages of the RevNet whose angle is followed.
        seeds: of the accuracies over depth; over slopes only the first.
    """

    depths: dict[str, tuple[int, ...]]
    slope_depths: dict[str, int]
    slopes: tuple[float, ...]
    updates: int
    angle_updates: int
    every: int
    batch: int
    blocks: int
    seeds: tuple[int, ...]


FULL = Size(
    depths={"layer-wise": (8, 16, 24), "hybrid": (6, 12, 24)},
    slope_depths={"layer-wise": 8, "hybrid": 6},
    slopes=(0.05, 0.2, 0.5),
    updates=150,
    angle_updates=100,
    every=5,
    batch=64,
    blocks=6,
    seeds=SEEDS,
)
MNIST = replace(FULL, updates=400, batch=32, seeds=SEEDS[:1])
QUICK = Size(
    depths={"layer-wise": (2, 3), "hybrid": (2,)},
    slope_depths={"layer-wise": 2, "hybrid": 2},
    slopes=(0.1, 0.5),
    updates=2,
    angle_updates=2,
    every=1,
    batch=8,
    blocks=1,
    seeds=SEEDS[:1],
)


@dataclass(frozen=True)
class Images:
    """Images and labels, padded by a pixel on each side.

    Shapes: images (n, 1, H + 2, W + 2), labels (n,).
    Args:
        train: images and labels for training.
        test: the same for testing.
        corners: where images are cropped for testing, in both directions [pixels].
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    corners: tuple[int, ...]

    @property
    def side(self) -> int:
        """The height and width of an image."""
        return self.train[0].shape[-1] - 2

    def draw(self, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a random batch for training, shifted by up to a pixel in each direction."""
        images, labels = self.train
        chosen = torch.randint(len(images), (size,), generator=rng)
        corners = torch.randint(3, (2, size), generator=rng)
        rows, columns = corners[:, :, None] + torch.arange(self.side)
        return images[chosen[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None], labels[chosen]

    def list_tests(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images for testing, in each position."""
        images, labels = self.test
        for row in self.corners:
            for column in self.corners:
                yield images[:, :, row : row + self.side, column : column + self.side], labels


def load_images(mnist: Path | None) -> Images:
    """Return scikit-learn's digits, or MNIST from a folder, averaged over 2x2 pixels."""
    if mnist is None:
        spec = revzoo.load_spec("revnext_digits")
        splits = [(each.padded, each.labels) for each in load_digits(DataOptions("digits", 1, shift=1), spec.input, seed=0)]
        test = F.pad(splits[1][0], [1] * 4, value=float(splits[1][0].min()))
        return Images(splits[0], (test, splits[1][1]), (0, 1, 2))
    return Images(_read_mnist(mnist, "train"), _read_mnist(mnist, "t10k"), (1,))


def _read_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    pixels = _read_idx(folder / f"{split}-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
    images = F.avg_pool2d((pixels.float() - _MEAN) / _DEVIATION, 2)
    return F.pad(images, [1] * 4, value=-_MEAN / _DEVIATION), _read_idx(folder / f"{split}-labels-idx1-ubyte", 8).long()


def _read_idx(path: Path, header: int) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()[header:]), dtype=torch.uint8)


def create(network: str, depth: int, slope: float = SLOPE, side: int = 8) -> revzoo.Model:
    """Return a new network of `depth` blocks (hybrid) or convolutions (layer-wise), a quarter of them before the pooling."""
    first = max(1, depth // 4)
    overrides = [f"stages.0.depth={first}", f"stages.1.depth={depth - first}", f"stem.slope={slope}", f"block.f.slope={slope}"]
    if network == "hybrid":
        overrides.append(f"block.g.slope={slope}")
    name = {"hybrid": "revnext_digits", "layer-wise": "layerwise_digits"}[network]
    return revzoo.create(name, overrides=[*overrides, f"input.size=[{side},{side}]"])


def measure_layers() -> dict[str, Any]:
    """Return alpha of single layers, measured and by formula."""
    torch.manual_seed(0)
    slopes = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0]
    rhos = [1, 1.5, 2, 3, 4, 6, 8]
    rows: dict[str, Any] = {"leaky_relu": [], "batch_norm": [], "other": {}}
    for slope in slopes:
        rows["leaky_relu"].append([slope, *measure_alpha(InvertibleLeakyReLU(slope), torch.randn(16, 16, 32, 32))])
    for rho in rhos:
        norm = InvertibleBatchNorm2d(2, eps_i=0.0)
        norm.weight.data[1] = rho
        rows["batch_norm"].append([rho, *measure_alpha(norm, torch.randn(16, 2, 32, 32))])
    for name, layer in (
        ("coupled convolution", CoupledConv2d(16)),
        ("channel pooling", SpaceToDepth()),
        ("batch pooling", SpaceToBatch()),
    ):
        rows["other"][name] = list(measure_alpha(layer, torch.randn(4, 16, 16, 16)))
    return rows


def measure_states(size: Size, images: Images) -> dict[str, Any]:
    """Return the ratios of all states of the deepest networks, new, and the lowest ratios over depth and slope."""
    x, labels = images.draw(size.batch, torch.Generator().manual_seed(0))
    result: dict[str, Any] = {"states": {}, "depths": {}, "slopes": {}}

    def measure(network: str, depth: int, slope: float = SLOPE) -> Any:
        torch.manual_seed(0)
        return revzoo.measure_numerics(create(network, depth, slope, images.side), x, loss=lambda y: F.cross_entropy(y, labels))

    for network, depths in size.depths.items():
        reports = {depth: measure(network, depth) for depth in depths}
        result["states"][network] = reports[depths[-1]].to_dict()["states"]
        result["depths"][network] = [[depth, *_summarise_report(report)] for depth, report in reports.items()]
        slopes = [(slope, measure(network, size.slope_depths[network], slope)) for slope in size.slopes]
        result["slopes"][network] = [[slope, *_summarise_report(report)] for slope, report in slopes]
    return result


def _summarise_report(report: revzoo.NumericsReport) -> tuple[float, float | None]:
    """Return the lowest ratio, and the angle; None if the gradients are not finite."""
    assert report.worst is not None
    return report.worst.snr, None if math.isnan(report.angle) else report.angle


def train(model: nn.Module, images: Images, updates: int, batch: int, seed: int) -> float:
    """Train with AdamW and a rate that rises and falls linearly; return the test accuracy [%]."""
    optimizer = torch.optim.AdamW(model.parameters(), _LR, weight_decay=_DECAY)
    warm_up = max(1, round(_WARM_UP * updates))
    scale = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / warm_up, (updates - k) / (updates - warm_up)))
    rng = torch.Generator().manual_seed(seed)
    with set_tripwire(False), ignore_error_growth():
        for _ in range(updates):
            x, labels = images.draw(batch, rng)
            F.cross_entropy(model(x), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scale.step()
    return measure_accuracy(model.eval(), images)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Images) -> float:
    pairs = [(x, y) for x, labels in images.list_tests() for x, y in zip(x.split(512), labels.split(512), strict=True)]
    correct = sum(int((model(x).argmax(1) == labels).sum()) for x, labels in pairs)
    return 100 * correct / sum(len(labels) for _, labels in pairs)


def measure_accuracies(size: Size, images: Images, console: Console) -> dict[str, Any]:
    """Return the accuracies of stored and rebuilt activations, by network, over depth and slope."""
    result: dict[str, Any] = {"depths": [], "slopes": []}
    known: dict[tuple[str, int, float, int], dict[str, Any]] = {}
    for network, depths in size.depths.items():
        cases = [("depths", depth, SLOPE, seed) for depth in depths for seed in size.seeds]
        cases += [("slopes", size.slope_depths[network], slope, size.seeds[0]) for slope in size.slopes]
        for over, depth, slope, seed in cases:
            if (case := (network, depth, slope, seed)) not in known:
                known[case] = _train_twice(size, images, *case)
                row = known[case]
                console.print(f"{network}, {depth} deep, slope {slope}: {row['store']:.2f} stored, {row['invert']:.2f} rebuilt")
            result[over].append(known[case])
    return result


def _train_twice(size: Size, images: Images, network: str, depth: int, slope: float, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"network": network, "depth": depth, "slope": slope, "seed": seed}
    for schedule in ("store", "invert"):
        torch.manual_seed(seed)
        model = create(network, depth, slope, images.side)
        model.schedule = schedule
        row[schedule] = train(model, images, size.updates, size.batch, seed)
    return row


def follow_angles(size: Size, console: Console) -> dict[str, Any]:
    """Return the angle of a RevNet's gradients during its training on digits, by arithmetic."""
    images, result = load_images(None), {}
    kinds: dict[str, tuple[torch.dtype, bool, AbstractContextManager[object]]] = {
        "float32": (torch.float32, False, nullcontext()),
        "autocast": (torch.float32, False, torch.autocast("cpu", torch.bfloat16)),
        "bfloat16 streams": (torch.bfloat16, False, nullcontext()),
        "exact": (torch.float32, True, nullcontext()),
    }
    for name, (dtype, exact, context) in kinds.items():
        torch.manual_seed(0)
        overrides = [f"stages.{i}.depth={size.blocks}" for i in range(3)]
        model = revzoo.create("revnet_digits", overrides=overrides, exact=exact, dtype=dtype)
        rng = torch.Generator().manual_seed(0)
        batches = ((x.to(dtype), labels) for x, labels in (images.draw(size.batch, rng) for _ in range(size.angle_updates)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        with context:
            result[name] = list(follow_training(model, batches, optimizer, size.every))
        first, last = (result[name][i]["angle"] for i in (0, -1))
        console.print(f"{name}: angle {first:.2g} at the start, {last:.2g} degrees at the end")
    return result


def follow_training(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer, every: int
) -> Iterator[dict[str, Any]]:
    """Train the model, however large the noise, and measure the gradient of every `every`-th update before it.

    Yields the number of updates before it, the loss of its batch, the lowest ratio of a rebuilt state (None: every bit was
    rebuilt), and the angle to the gradients of storing everything [degrees].
    """
    for update, (x, labels) in enumerate(batches):
        point = None
        if update % every == 0:
            point = revzoo.measure_numerics(model, x, loss=lambda y, labels=labels: F.cross_entropy(y, labels)).to_dict()
        with set_tripwire(False), ignore_error_growth():
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.clear_autocast_cache()  # of weights as they were before the update
        if point is not None:
            lowest = min(point["states"], key=lambda state: math.inf if state["snr"] is None else state["snr"])
            yield {"update": update, "loss": float(loss.detach()), "snr": lowest["snr"], "angle": point["angle"]}


def summarise(accuracies: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the means over seeds, by network and depth, and by how much rebuilt ones differ."""
    rows = []
    for network, depth in dict.fromkeys((row["network"], row["depth"]) for row in accuracies["depths"]):
        same = [row for row in accuracies["depths"] if (row["network"], row["depth"]) == (network, depth)]
        stored, rebuilt = (mean(row[schedule] for row in same) for schedule in ("store", "invert"))
        rows.append({"network": network, "depth": depth, "store": stored, "invert": rebuilt, "difference": rebuilt - stored})
    return rows


def draw_alpha(layers: dict[str, Any], path: Path) -> None:
    figure = new_figure(10, 4)
    figure.set_layout_engine("constrained")
    labels = {"leaky_relu": "slope of LeakyReLU", "batch_norm": "scale of BatchNorm's second channel; of the first: 1"}
    for axes, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        places, measured, formula = zip(*layers[key], strict=True)
        axes.plot(places, formula, color=PALE, label="formula")
        axes.plot(places, measured, "o", color=ORANGE, ms=5, label="measured")
        axes.set_yscale("log")
        _finish(axes, "alpha: change of the signal-to-noise ratio by the inverse", label)
    save(figure, path)


def draw_networks(ratios: dict[str, Any], path: Path) -> None:
    figure = new_figure(11, 4)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (network, states) in zip(panels, ratios["states"].items(), strict=True):
        _draw_states(axes, states)
        title = f"{network}, {ratios['depths'][network][-1][0]} deep: signal-to-noise ratio"
        _finish(axes, title, "rebuilt state, in the order of forward")
    save(figure, path)


def _draw_states(axes: Axes, states: Sequence[dict[str, Any]]) -> None:
    """Draw the ratio of every state, as in JSON, against its place in forward; states between steps are dots."""
    places = range(1, len(states) + 1)
    for key, color, style, label in (("predicted_snr", PALE, ":", "predicted"), ("snr", BLUE, "-", "measured")):
        axes.plot(places, [state[key] or math.nan for state in states], style, color=color, lw=1.4, label=label)
    of_steps = [(place, state["snr"]) for place, state in zip(places, states, strict=True) if not state["of_layer"]]
    if 0 < len(of_steps) < len(states):
        axes.plot(*zip(*of_steps, strict=True), "o", ms=4, color=BLUE, label="between steps")
    axes.set_yscale("log")
    axes.tick_params(which="minor", left=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))


def draw_ratios(ratios: dict[str, Any], path: Path) -> None:
    figure = new_figure(10, 4)
    figure.set_layout_engine("constrained")
    for axes, (key, (_, label)) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for network, rows in ratios[key].items():
            places, lowest, _ = zip(*rows, strict=True)
            axes.plot(places, lowest, "o-", color=_COLORS[network], ms=4, label=network)
        axes.set_yscale("log")
        _finish(axes, "lowest signal-to-noise ratio of a rebuilt state", label)
    save(figure, path)


def draw_accuracies(accuracies: dict[str, Any], path: Path) -> None:
    figure = new_figure(10, 4)
    figure.set_layout_engine("constrained")
    for axes, (key, (over, label)) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for network, color in _COLORS.items():
            rows = [row for row in accuracies[key] if row["network"] == network]
            places = list(dict.fromkeys(row[over] for row in rows))
            for schedule, style, kind in (("store", ":", "stored"), ("invert", "-", "rebuilt")):
                means = [mean(row[schedule] for row in rows if row[over] == place) for place in places]
                fill = "white" if schedule == "store" else color
                axes.plot(places, means, f"o{style}", color=color, ms=4, mfc=fill, label=f"{network}, {kind}")
        _finish(axes, "test accuracy [%]", label)
    save(figure, path)


def draw_angles(angles: dict[str, Any], path: Path) -> None:
    figure = new_figure(10, 4)
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2)
    for (name, points), color in zip(angles.items(), (BLUE, ORANGE, RED, INK), strict=True):
        updates = [point["update"] for point in points]
        left.plot(updates, [point["angle"] or float("nan") for point in points], color=color, label=name)
        right.plot(updates, [point["loss"] for point in points], color=color, label=name)
    left.set_yscale("log")
    _finish(left, "angle between the gradients, stored and rebuilt [degrees]; exact: 0", "updates")
    _finish(right, "training loss", "updates")
    save(figure, path)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8)
    if label == "depth":
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    simplify_axes(axes)


_NAMES = {"digits": "numerics", "MNIST": "numerics_mnist"}  # of the files that are written
_FIGURES = {
    "alpha": (draw_alpha, "layers"),
    "states": (draw_networks, "ratios"),
    "ratios": (draw_ratios, "ratios"),
    "accuracy": (draw_accuracies, "accuracies"),
    "angle": (draw_angles, "angles"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="folder for the JSON and the pictures")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder with MNIST's four files")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = "digits" if args.mnist is None else "MNIST"
    size, console, begin = QUICK if args.quick else FULL if data == "digits" else MNIST, Console(), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    images = load_images(args.mnist)
    result: dict[str, Any] = {"ratios": measure_states(size, images)}
    if data == "digits":  # what does not depend on the images
        result |= {"layers": measure_layers(), "angles": follow_angles(size, console)}
    result["accuracies"] = measure_accuracies(size, images, console)
    result["summary"] = summarise(result["accuracies"])
    for row in result["summary"]:
        console.print(
            f"{row['network']}, {row['depth']} deep: {row['store']:.2f} stored, rebuilt {row['difference']:+.2f} points"
        )
    facts = {"seconds": time.perf_counter() - begin, "data": data, "side": images.side, "size": asdict(size), "points": POINTS}
    path = args.out / f"{_NAMES[data]}.json"
    path.write_text(json.dumps(describe_environment(args.mnist) | facts | result, indent=1, allow_nan=False) + "\n")
    for name, (draw, key) in _FIGURES.items():
        if key in result:
            draw(result[key], args.out / f"{_NAMES[data]}_{name}.png")


if __name__ == "__main__":
    main()
