"""What a method of merging heads says of itself, and how it merges heads without reading the model.

A method that computes maps first, from weights or from text, is a `MapsMethod` (maps_method.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from gqa.convert.head_maps import HeadMaps, mean_maps
from gqa.core.errors import layerwise_error

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint
    from gqa.convert.head_maps import MergeHeads
    from gqa.convert.heads.config import ModelConfig
    from gqa.convert.heads.modules import AttentionModule, Change

Reads = Literal["nothing", "weights", "text"]
# Kinds of options of gqa-convert that only some methods read: how maps are computed, the text, the
# training of layers, the seed. `option(setting=...)` gives an option its kind, and
# `Method.settings` lists the kinds that a method reads.
Settings = Literal["maps", "text", "training", "seed"]
# What a method may need of a model:
# - layers: it runs them on text, one after the other;
# - symmetry: it aligns heads;
# - inputs: it estimates what each layer reads, from the embeddings and the layers before.
Need = Literal["layers", "symmetry", "inputs"]


class Method:
    """One method of merging heads.

    name: Of `--method`.
    reads: What it reads besides the numbers of heads: nothing, the weights, or text that runs
        through the model.
    cost, result: The time it takes, and what the heads of the result are, in words.
    settings: Which options it uses.
    needs: What it needs of a model; other models are refused (`obstacle`).
    example_ratio: Perplexity ratio of the example model with 2 of 8 KV heads (docs/results.md), by
        which messages and docs compare methods; empty if it was not measured.
    is_control: Whether it is for comparisons only: never recommended, and listed by --dry-run only
        if it is the plan's own. So is a method that needs `symmetry` and aligns no heads.
    merges: Whether it makes fewer heads. Those of unmerged.py, which no user chooses, do not.
    """

    name: ClassVar[str]
    reads: ClassVar[Reads] = "nothing"
    cost: ClassVar[str]
    result: ClassVar[str]
    settings: ClassVar[frozenset[Settings]] = frozenset()
    needs: ClassVar[frozenset[Need]] = frozenset()
    example_ratio: ClassVar[str] = ""
    is_control: ClassVar[bool] = False
    merges: ClassVar[bool] = True

    @property
    def computes_maps(self) -> bool:
        """Whether it computes maps first, from weights or text. Then W_Q and W_O fit the merged
        heads too, and uptraining changes attention alone.
        """
        return self.reads != "nothing"

    def obstacle(
        self, checkpoint: Checkpoint, config: ModelConfig, modules: Sequence[AttentionModule]
    ) -> str:
        """Why the method cannot merge the heads of a model; empty if it can."""
        model = f"{checkpoint.name} ({config.text_config.model_type})"
        if "layers" in self.needs:
            reason = _why_not_layerwise(checkpoint, config)
            if reason:
                return str(layerwise_error(model, reason))

        if "symmetry" in self.needs and isinstance(config.symmetry, str):
            return f"--method {self.name} cannot align the heads of {model}: {config.symmetry}"

        if "inputs" in self.needs:
            from gqa.convert.heads.layer_parts import can_estimate_inputs

            if not can_estimate_inputs(checkpoint, config, modules):
                return (
                    f"--method {self.name} needs layers of attention and one MLP, but {model} has "
                    "other layers"
                )
        return ""

    def fixed_maps(self, kv: int, groups: int) -> HeadMaps:
        """The maps of a module for which none are computed, from Hk and G alone.

        Methods that read text use them for layers that predict further tokens.
        """
        return mean_maps(kv, groups)

    def merge_without_maps(self, change: Change, config: ModelConfig, seed: int) -> MergeHeads:
        """How the heads of one stored tensor are merged, of a module for which no maps are
        computed.
        """
        return self.fixed_maps(change.heads.kv, change.groups).merge


def _why_not_layerwise(checkpoint: Checkpoint, config: ModelConfig) -> str | None:
    """Why a model cannot be run layer by layer; None if no reason is known."""
    reason = config.why_not_layerwise
    if not reason and checkpoint.packed:
        return "its other weights are quantized"
    return reason
