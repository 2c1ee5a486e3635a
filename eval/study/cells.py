"""From cells to rows: convert once, train once along all alphas, and measure at each of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import OutputError, RefusedError, explain, one_line
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.loading import load_model
from gqa.convert import convert_checkpoint
from gqa.convert.align.cache_bits import quantise_cache, quantised_attention
from gqa.convert.heads.layout import Groups
from gqa.convert.plan import make_plan
from gqa.corpus.likelihood import ChunkedHead
from gqa.corpus.windows import Window
from gqa.eval.decode import decode_contexts, measure_decode
from gqa.eval.evaluate import Probe, summary
from gqa.eval.report import recalled
from gqa.eval.scoring import score
from gqa.eval.study.directory import Row, UnwrittenError
from gqa.eval.study.study import UNMERGED, Cell, StudyOptions
from gqa.eval.subjects import Subject
from gqa.eval.text import Text
from gqa.uptrain.loop import DivergedError, StoppedError, Weights, train
from gqa.uptrain.lora import merged
from gqa.uptrain.setup import prepare

STEPS, REPEATS = 32, 5  # of decoding
CONVERTED = "converted"  # in the place for work, of each conversion
Done = Callable[..., None]  # gets a cell, and its error or the columns that were found


@dataclass
class Bench:
    """What cells are measured with, found out once. It keeps the source in memory, as teacher.

    source_nats: (N,) of the source on `text`; steps: of each alpha; heads: of all layers, by `Cell.heads`; layers: how
    many have a KV cache; probe: what is asked about the context, if anything is.
    """

    options: StudyOptions
    work: Path
    text: Text
    source_nats: NDArray[np.float32]
    steps: dict[float, int]
    heads: Mapping[str, Groups]
    layers: int = 0
    probe: Probe | None = None

    def load(self, path: Path | str, dtype: str) -> PreTrainedModel:
        return load_model(str(path), dtype=dtype, device=self.options.run_device)

    @cached_property
    def teacher(self) -> PreTrainedModel:
        return self.load(self.options.model, "auto")

    @cached_property
    def baseline(self) -> ChunkedHead | None:
        """The source in the precision of measuring, where distributions are compared with its own."""
        if not self.options.kl:
            return None
        same = self.options.dtype in ("auto", str(self.teacher.dtype).removeprefix("torch."))
        return ChunkedHead(self.teacher if same else self.load(self.options.model, self.options.dtype))

    @contextmanager
    def cache_of(self, model: PreTrainedModel, bits: int | None) -> Iterator[None]:
        """Meanwhile attention reads a KV cache of `bits`, as in `gqa-eval --cache-bits`. Raises RefusedError."""
        if bits is None:
            yield
            return
        plain = model.config._attn_implementation
        with quantised_attention([bits]):
            try:
                quantise_cache(model, bits, self.layers, self.options.model)
                yield
            finally:
                model.set_attn_implementation(plain)

    def qualities(self, model: PreTrainedModel, cells: Sequence[Cell]) -> Iterator[tuple[list[Cell], Row]]:
        """For each number of bits the cells that have it, and columns of what a model predicts with it."""
        for bits in dict.fromkeys(cell.bits for cell in cells):
            with self.cache_of(model, bits):
                found = self.quality(model)
            if self.probe and bits is None:
                found["samples"] = self.probe.written_by(model)
            yield [cell for cell in cells if cell.bits == bits], found

    def quality(self, model: PreTrainedModel) -> Row:
        """Columns of what a model predicts."""
        start, text, head = time.perf_counter(), self.text, ChunkedHead(model)
        scores = score(head, text.windows, batch_size=self.options.eval_batch, baseline=self.baseline)
        found = summary(scores, text, self.source_nats)
        own, against = found["quality"], found["against_baseline"]
        return {
            "loss": own["nats_per_token"],
            "loss_increase": against["log_ratio"],
            "loss_increase_error": against["log_ratio_error"],
            "perplexity": own["token_perplexity"],
            "perplexity_ratio": against["ratio"],
            "perplexity_ratio_low": against.get("ratio_low"),
            "perplexity_ratio_high": against.get("ratio_high"),
            "bits_per_byte": own["bits_per_byte"],
            "kl": against["kl"]["mean"] if self.baseline else None,
            "top1_agreement": against["same_top"] if self.baseline else None,
            "acceptance": against["acceptance"] if self.baseline else None,
            **self.recall(head),
            "seconds_evaluating": time.perf_counter() - start,
        }

    def recall(self, head: ChunkedHead) -> Row:
        """Columns of what a model finds again in its context: of each kind the share of right answers at all distances,
        and everything by distance.
        """
        if self.probe is None:
            return {}
        found = self.probe.measured(score(head, self.probe.windows, batch_size=self.options.eval_batch))
        shares = {f"recall_{kind.replace('-', '_')}": share for kind, share in recalled(found).items()}
        return {**shares, "greedy_tokens": found["greedy"]["tokens"], "recall_by_distance": found["recall"]}

    def first_reading(self, head: ChunkedHead) -> Row:
        """The share of `recall_text` that a model gets right where the same tokens stand first: without any recall."""
        if self.probe is None:
            return {}
        copies = chain.from_iterable(one.windows for one in self.probe.asked if one.kind == "text")
        firsts = [Window(copy.ids[: copy.scored + 2], copy.scored) for copy in copies]
        hits = score(head, firsts, batch_size=self.options.eval_batch).hits
        return {"recall_first_reading": float(hits.mean())}


def measure_conversion(bench: Bench, cells: Sequence[Cell], report: Callable[[Row], None]) -> None:
    """Report a row for each of the cells of one conversion, as soon as it is there; what goes wrong is a row too.

    Raises StoppedError, where a signal asked for the end of a training, and what `report` raises where rows cannot be
    kept, UnwrittenError.
    """
    left, errors = dict.fromkeys(cells), []

    def done(cell: Cell, error: str | None = None, **found: Any) -> None:
        report(cell.row(error, **found))
        del left[cell]

    @contextmanager
    def failing(some: Sequence[Cell]) -> Iterator[None]:
        """What goes wrong is the row of those of the cells that have none."""
        try:
            yield
        except (StoppedError, UnwrittenError):
            raise
        except Exception as error:
            errors.append(_told(error))
            for cell in [cell for cell in some if cell in left]:
                done(cell, errors[-1])

    work = bench.work / cells[0].conversion
    with failing(cells):
        seconds = convert(bench, cells[0], work)
        model = bench.load(work / CONVERTED, bench.options.dtype)
        for some, found in bench.qualities(model, [cell for cell in cells if not cell.alpha]):
            for cell in some:
                done(cell, **found, train_tokens=0, seconds_converting=seconds, seconds_training=0.0)
    for run in bench.options.runs(list(left)):
        with failing(run):
            train_along(bench, work / CONVERTED, seconds, run, model, done)
    if not errors:  # else what is there serves the next attempt
        shutil.rmtree(work)


def _told(error: Exception) -> str:
    """One line for a row."""
    if isinstance(error, RefusedError | OutputError | DivergedError):
        return one_line(str(error))
    if out_of_memory(error):
        return "the memory of the device is too small; give --micro-batch, a smaller --eval-batch or --precision bf16"
    return one_line(f"{type(error).__name__}: {explain(error)}")


def convert(bench: Bench, cell: Cell, work: Path) -> float:
    """The seconds that the checkpoint in `work` took; one that a killed study left is taken as it is."""
    options, groups, note = bench.options, bench.heads[cell.heads], work / "seconds.json"
    if note.exists():
        return float(json.loads(note.read_text()))
    start, method = time.perf_counter(), "mean" if cell.method in UNMERGED else cell.method
    plan = make_plan(open_model(options.model), groups, method, cell.seed)
    calibration = options.maps_of(cell) if plan.lacks_maps else None
    convert_checkpoint(
        options.model, groups, work / CONVERTED, method=method, seed=cell.seed, calibration=calibration, overwrite=True
    )
    seconds = time.perf_counter() - start
    note.write_text(json.dumps(seconds))
    return seconds


def train_along(
    bench: Bench, directory: Path, seconds: float, cells: Sequence[Cell], model: PreTrainedModel, done: Done
) -> None:
    """One training, measured at the alpha of each of `cells`, which are in ascending order; `model` is overwritten with
    what is measured: the weights as gqa-uptrain would store them. Raises what training raises.

    Where the rate stays constant these are the weights on the way. Else they are the best by the training's own
    held-out loss, which may be those that came.
    """
    options, last = bench.options.training_of(cells[-1], directory), dict[str, Any]()
    resume = any(options.output.with_name(f"{options.output.name}-state").glob("step-*"))
    setup = prepare(replace(options, resume=resume), bench.teacher if options.teachers else None)
    if bench.options.along:
        setup = replace(setup, heldout=[])

    def measure(due: Sequence[Cell], weights: Weights, tokens: int) -> None:
        model.load_state_dict(weights)
        rate = last.get("tokens_per_second")
        common = {"train_tokens": tokens, "train_loss": last.get("loss"), "seconds_converting": seconds}
        for some, found in bench.qualities(model, due):
            for cell in some:
                done(cell, **found, **common, seconds_training=tokens / rate if rate else None)

    def after_step(step: int, record: dict[str, Any], weights: Callable[[], Weights]) -> None:
        last.update(record)
        if due := [cell for cell in cells if bench.options.along and bench.steps[cell.alpha] == step]:
            measure(due, weights(), record["tokens"])

    with setup.states.held():
        progress, weights = train(setup, after_step=after_step)
        if not bench.options.along:
            measure(cells, merged(weights) or load_model(str(directory), dtype="auto").state_dict(), progress.tokens)
    shutil.rmtree(setup.states.directory, ignore_errors=True)


def measure_speeds(
    subject: Subject, options: StudyOptions, sizes: Mapping[str, tuple[Groups, int | None]], work: Path
) -> dict[str, dict[str, Any]]:
    """Columns by `Cell.cache`, as neither the method nor the weights change them: KV bytes of a token, by formula, and
    of those that are not quantised the time of decoding one. They are timed in turns, each as a conversion whose
    weights are means.

    sizes: the heads and the bits of each; heads that differ by layer are a column, too.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, (groups, bits) in sizes.items():
        plan = make_plan(subject.checkpoint, groups, "mean")
        cache = plan.cache_after.quantised(bits) if bits else plan.cache_after
        after, before = cache.bytes_per_token, plan.cache_before.bytes_per_token
        found[name] = {"kv_bytes_per_token": after, "kv_share": after / before}
        if isinstance(groups, tuple):
            found[name]["kv_heads"] = list(groups)
        if cross := cache.cross_bytes_per_token:
            found[name]["cross_bytes_per_token"] = cross  # of each token of the source
    whole = [name for name, (_, bits) in sizes.items() if not bits]
    if not (options.decode and whole):
        return found
    asked = (options.decode_context,) if options.decode_context else None
    context = decode_contexts([subject], asked, STEPS)[-1]
    models = {}
    for name in whole:
        place = work / f"speed-g{name}"
        convert_checkpoint(options.model, sizes[name][0], place, overwrite=True, method="mean")
        models[name] = load_model(str(place), dtype=options.dtype, device=options.run_device)
        shutil.rmtree(place)
    timed = measure_decode(models, [options.decode_batch], [context], STEPS, REPEATS)
    for name, (point,) in timed.items():
        found[name] |= {
            "decode_seconds_per_token": point["seconds_per_token"],
            "decode_fastest": point["fastest"],
            "decode_slowest": point["slowest"],
            "decode_tokens_per_second": point["tokens_per_second"],
            "decode_tokens_before": context,
        }
    return found
