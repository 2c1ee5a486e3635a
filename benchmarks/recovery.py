"""What further training recovers: held-out loss against tokens for each method of conversion, with and without teacher.

    python benchmarks/recovery.py                                      # examples/stdlib-mha -> 2 KV heads, the table
    python benchmarks/recovery.py --json recovery.json --plot recovery.svg
    python benchmarks/recovery.py --method mean --no-teacher --no-control --alpha 0.01 --learning-rate 3e-4

For each method the source is converted and trained on the largest alpha of the standard library's training modules, at
a constant learning rate after a warm-up. Every smaller alpha is a prefix of it, so the loss there is read off on the
way. All runs see the same blocks in the same order. The loss is that of the same blocks of held-out modules, in nats a
token. The share in brackets is what the training took away of the difference between the converted model and the
source.

The control is the source itself, trained on the same tokens with the settings of the runs without a teacher. Where it
improves, part of what a converted model gains is new learning rather than recovery; where it gets worse, part of the
gap that is left is the training's own doing.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

EMBEDDED = Path(__file__).parents[1] / "examples" / "stdlib-mha"
CONTROL = "source, trained on"
PAPER = ("mean", "first", "random")  # those of arXiv 2305.13245; `--method refined` and the others work too


@dataclass(frozen=True)
class Run:
    """A model's loss before training and at each alpha, and the seconds of training until there."""

    model: str
    taught: bool
    before: float
    losses: list[float]
    seconds: list[float]

    @property
    def name(self) -> str:
        return f"{self.model}, taught" if self.taught else self.model

    def closed(self, source: float) -> list[float]:
        """Which share of the gap to the source is gone at each alpha."""
        return [(self.before - loss) / (self.before - source) for loss in self.losses]


# ------------------------------------------------------------------------------------------------- running


def train_options(model: str, taught: bool, options: dict[str, Any], scratch: Path) -> Any:
    from gqa.uptrain.options import TrainOptions

    return TrainOptions(
        model=model, output=scratch / "trained", overwrite=True, data=("stdlib:train",), alpha=max(options["alphas"]),
        block_size=options["block_size"], batch_size=options["batch_size"], precision=options["precision"],
        learning_rate=options["teacher_learning_rate" if taught else "learning_rate"], warmup=options["warmup"],
        teacher=options["model"] if taught else None, heldout_tokens=options["heldout_tokens"], seed=options["seed"],
    )  # fmt: skip


def steps_of(alphas: list[float], setup: Any) -> list[int]:
    """The step after which a run on each alpha would end."""
    from gqa.uptrain.feed import open_feed

    feeds = [open_feed(replace(setup.options, alpha=alpha), setup.tokenizer, setup.block_size) for alpha in alphas]
    return [feed.steps for feed in feeds]


def heldout(setup: Any) -> float:
    from gqa.uptrain.loop import heldout_loss
    from gqa.uptrain.training_model import TrainingModel

    with setup.accelerator.autocast():
        return heldout_loss(setup.accelerator, TrainingModel(setup.model), setup.heldout, micro=16)


def train(model: str, name: str, taught: bool, options: dict[str, Any], scratch: Path) -> tuple[Run, list[int]]:
    """Train the checkpoint `model` on the largest alpha; also returns the tokens of each alpha."""
    from gqa.uptrain.run import prepare, run

    setup = prepare(train_options(model, taught, options, scratch))
    steps = steps_of(options["alphas"], setup)
    before = heldout(setup)
    losses: list[float] = []
    seconds: list[float] = []
    started, paused = time.perf_counter(), 0.0

    def after_step(step: int, record: dict[str, Any], weights: Any) -> None:
        nonlocal paused
        now = time.perf_counter()
        for _ in range(steps.count(step)):  # twice where two alphas are less than a step apart
            seconds.append(now - started - paused)
            losses.append(heldout(setup))
        paused += time.perf_counter() - now

    run(replace(setup, heldout=[]), after_step=after_step)
    return Run(name, taught, before, losses, seconds), [step * setup.feed.tokens_per_step for step in steps]


def experiment(options: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """All runs; the control last."""
    from gqa.convert import convert_checkpoint
    from gqa.convert.errors import RefusedError

    jobs = [
        (method, taught)
        for method in options["methods"]
        for taught in ([False, True] if options["teacher"] else [False])
    ]
    runs: list[Run] = []
    tokens: list[int] = []
    for method, taught in [*jobs, *([(CONTROL, False)] if options["control"] else [])]:
        model = options["model"]
        if method != CONTROL:
            model = str(scratch / "converted")
            try:
                convert_checkpoint(
                    options["model"], options["groups"], model, method=method, seed=options["seed"], overwrite=True
                )
            except RefusedError as error:
                print(f"  {method}: {error}", flush=True)
                continue
        found, tokens = train(model, method, taught, options, scratch)
        runs.append(found)
        print(f"  {found.name:24}{found.before:8.4f} -> {found.losses[-1]:.4f}  {found.seconds[-1]:6.0f} s", flush=True)
    source = next((run.before for run in runs if run.model == CONTROL), None)
    if source is None:
        from gqa.uptrain.run import prepare

        source = heldout(prepare(train_options(options["model"], False, options, scratch)))
    return {"options": options, "tokens": tokens, "source": source, "runs": [asdict(run) for run in runs]}


# ------------------------------------------------------------------------------------------------- report


def report(figures: dict[str, Any]) -> None:
    options, source = figures["options"], figures["source"]
    runs = [Run(**run) for run in figures["runs"]]
    alphas = options["alphas"]
    print(
        f"\n{Path(options['model']).name} -> {options['groups']} KV heads; held-out loss in nats a token (share of the "
        f"gap to the source's {source:.4f} that is closed)\n"
    )
    print(f"{'':24}{'converted':>10}" + "".join(f"{f'alpha {alpha:g}':>17}" for alpha in alphas) + f"{'training':>11}")
    print(f"{'tokens':24}{0:10,}" + "".join(f"{count:17,}" for count in figures["tokens"]))
    for run in runs:
        shares = [""] * len(alphas) if run.model == CONTROL else [f" ({share:.0%})" for share in run.closed(source)]
        cells = "".join(f"{f'{loss:.4f}{share}':>17}" for loss, share in zip(run.losses, shares, strict=True))
        print(f"{run.name:24}{run.before:10.4f}{cells}{run.seconds[-1]:9,.0f} s")
    print()
    for taught in (False, True):
        compared = [run for run in runs if run.taught == taught and run.model != CONTROL]
        for index, alpha in enumerate(alphas if len(compared) > 1 else []):
            order = " < ".join(run.model for run in sorted(compared, key=lambda run: run.losses[index]))
            print(f"alpha {alpha:g}, {'taught' if taught else 'no teacher'}: {order}")


def plot(figures: dict[str, Any], path: Path) -> None:
    """Loss against tokens: a colour and marker for each method, dashed where there is a teacher."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito
    runs = [Run(**run) for run in figures["runs"]]
    names = list(dict.fromkeys(run.model for run in runs))
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for run in runs:
        which = names.index(run.model)
        axes.plot(
            [0, *figures["tokens"]], [run.before, *run.losses], "--" if run.taught else "-", label=run.name,
            color=colours[which % len(colours)], marker="osD^vPX"[which % 7], markersize=5,
        )  # fmt: skip
    axes.axhline(figures["source"], color="0.4", linewidth=1, linestyle=":", label="source")
    axes.set_xlabel("tokens of further training")
    axes.set_ylabel("held-out loss, nats a token")
    axes.legend(fontsize=8)
    figure.savefig(path)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), help="The source.", show_default=False)
@click.option("--groups", type=int, default=2)
@click.option("--method", "methods", multiple=True, default=PAPER, help="Several times for several.")
@click.option("--alpha", "alphas", type=float, multiple=True, default=(0.01, 0.05, 0.1))
@click.option("--teacher/--no-teacher", default=True, help="Also train with the source as teacher.")
@click.option("--control/--no-control", default=True, help="Also train the source itself.")
@click.option("--learning-rate", type=float, default=1e-3, help="Without a teacher.")
@click.option("--teacher-learning-rate", type=float, default=1e-3, help="With one.")
@click.option("--warmup", type=int, default=5, help="Steps.")
@click.option("--batch-size", type=int, default=4, help="Blocks of a step.")
@click.option("--block-size", type=int, default=512)
@click.option("--precision", type=click.Choice(["no", "bf16"]), default="bf16")
@click.option("--heldout-tokens", type=int, default=65_536)
@click.option("--seed", type=int, default=0)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them (.svg, .png, .pdf).")
def main(json_file: Path | None, plot_file: Path | None, **options: Any) -> None:
    options["alphas"] = sorted(options["alphas"])
    with tempfile.TemporaryDirectory() as scratch:
        figures = experiment(options, Path(scratch))
    report(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if plot_file:
        plot(figures, plot_file)


if __name__ == "__main__":
    main()
