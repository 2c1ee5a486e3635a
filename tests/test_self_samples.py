"""`self:TOKENS`: a model's text is drawn from its own distribution, the same for every run, and
sampled once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import Recorder, edit_json, edit_tensors, header_only
from support.embedded import SOURCE, bring_tokenizer, copy_source, load, without_bos
from support.patches import sample_at_once, use_data_cache
from support.processes import small_disk
from transformers import LlamaConfig

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.generate import decoding_attention, sampling, self_samples
from gqa.convert.generate.decoding_attention import attend_one_query
from gqa.convert.generate.sample_store import store_batches
from gqa.convert.generate.sampling import TokenSampler, sample_sequences, sequences_of_model
from gqa.convert.generate.self_samples import SampledBlocks, sampled_blocks
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.console import SILENT
from gqa.core.errors import OutputError, RefusedError, TextError
from gqa.corpus.specs import is_self, parse_self
from gqa.eval import recall
from gqa.eval.subjects import Subject
from gqa.models.tokenizer import load_tokenizer
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.setup import build_data

SIZE = 12


@pytest.fixture(scope="module")
def teacher():
    return load(SOURCE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_data_cache(monkeypatch, tmp_path)
    sample_at_once(monkeypatch, 4)
    return tmp_path / "gqa-samples"


def sampled(
    teacher,
    n_blocks: int,
    seed: int = 0,
    source: Path = SOURCE,
    plain: bool = True,
    size: int = SIZE,
    **how: bool,
) -> tuple[SampledBlocks, list[int]]:
    """Blocks, and the numbers of tokens that were to be sampled and that were."""
    watcher, model = Recorder(), read_checkpoint(source)
    blocks = sampled_blocks(
        lambda dtype: teacher,
        "cpu",
        model,
        block_size=size,
        n_blocks=n_blocks,
        seed=seed,
        plain=plain,
        watcher=watcher,
        **how,
    )
    return blocks, [count for stage in watcher.stages for count in stage]


def ids(blocks: SampledBlocks) -> np.ndarray:
    return np.stack([blocks[i]["input_ids"] for i in range(len(blocks))])


def test_a_longer_run_goes_on_where_a_shorter_one_ended(teacher, cache: Path) -> None:
    """Also where it was interrupted: killed while a batch was written."""
    few, counts = sampled(teacher, 3)
    batch = 4 * (SIZE - 1)  # BOS is not sampled
    assert counts == [batch] * 2
    many, counts = sampled(teacher, 10)
    assert counts == [2 * batch] * 2
    few.path.write_bytes(few.path.read_bytes()[: -12 * SIZE - 7])
    for expected in ([batch] * 2, []):
        again, counts = sampled(teacher, 10)
        assert counts == expected
        assert np.array_equal(ids(many), ids(again))
    assert np.array_equal(ids(many)[:3], ids(few))
    assert few.fingerprint == many.fingerprint  # what a state of training must agree with
    assert len({row.tobytes() for row in ids(many)}) == 10
    assert ids(many).dtype == np.int64
    assert (ids(many)[:, 0] == teacher.config.bos_token_id).all()
    assert not np.array_equal(ids(sampled(teacher, 3, seed=1)[0]), ids(few))
    assert len(list(cache.glob("*.int32"))) == 2
    with pytest.raises(IndexError):
        few[3]


def write_batches(
    n_blocks: int, sampled: list[int], block_size: int = 1024, between: Callable[[], object] = int
) -> Path:
    """Store batches of 16 blocks of `block_size` numbers; the indices of those that were made are
    added to `sampled`.
    """

    def sample(batch_indices: Sequence[int]) -> Iterator[torch.Tensor]:
        for index in batch_indices:
            sampled.append(index)
            yield torch.full((16, block_size), index)
            between()

    return store_batches(
        "identity", block_size=block_size, batch_size=16, n_blocks=n_blocks, sample=sample
    )


def test_text_that_does_not_fit_into_the_cache_is_not_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = list[int]()
    with small_disk(tmp_path / "disk", "200k") as disk:
        use_data_cache(monkeypatch, disk)
        with pytest.raises(OutputError, match="262,144 bytes of generated text do not fit into"):
            write_batches(64, sampled)
    assert sampled == []


def test_text_that_is_stored_stays_if_the_disk_becomes_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When there is space again, only the rest is generated."""
    sampled = list[int]()
    with small_disk(tmp_path / "disk", "400k") as disk:
        other = disk / "other"
        use_data_cache(monkeypatch, disk)
        with pytest.raises(
            OutputError,
            match=r"No space left on device \(1 of 4 parts of the generated text are kept\); "
            r"free some "
            r"space",
        ):
            write_batches(64, sampled, between=lambda: other.write_bytes(bytes(290_000)))
        other.unlink()
        path = write_batches(64, sampled)
        stored = np.fromfile(path, np.int32).reshape(4, -1)
    assert sampled == [0, 1, 1, 2, 3]
    assert (stored == np.arange(4)[:, None]).all()


def test_what_is_trained_on_and_measured_is_other_text_than_calibration_has(
    teacher, cache: Path
) -> None:
    """Of one seed, and the same for every call: a result is not chosen by text that it was fitted
    to.
    """
    text = CalibrationText(("self:plain",), 8 * SIZE, SIZE)
    source = read_checkpoint(SOURCE)

    def calibrated() -> list[bytes]:
        return [
            row.numpy().tobytes()
            for row in CalibrationReader(text, source, "cpu", SILENT).blocks_and_heldout()[0]
        ]

    def trained() -> list[bytes]:
        options = UptrainOptions(
            str(SOURCE),
            Path(),
            data=("self:plain",),
            seed=text.seed,
            context=SIZE,
            steps=2,
            batch_size=4,
            validation_tokens=SIZE,
        )
        data = build_data(
            options, source, source, teacher.config, load_tokenizer(source), "cpu", SILENT
        )
        return [
            data.blocks[data.first_trained_block + number]["input_ids"].tobytes()
            for number in range(8)
        ]

    def measured() -> list[bytes]:
        return [
            row.tobytes()
            for row in recall.self_samples(
                Subject(SOURCE.name, str(SOURCE), source), SIZE, None, 4096
            )
        ]

    uses = [calibrated(), trained(), measured()]
    assert uses == [calibrated(), trained(), measured()]
    rows = [row for use in uses for row in use]
    assert len(set(rows)) == len(rows) == 2 * 8 + recall.SAMPLES
    two_texts = CalibrationText(("self:plain", f"self:plain:{8 * SIZE}"), 8 * SIZE, SIZE)
    twice, _ = CalibrationReader(two_texts, source, "cpu", SILENT).blocks_and_heldout()
    assert [row.numpy().tobytes() for row in twice[:8]] == uses[0]
    assert len({row.numpy().tobytes() for row in twice}) == len(twice) == 16


def test_samples_of_another_model_are_not_used(
    teacher, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another config, another weight, other versions of the libraries; a model that has moved keeps
    its own.
    """
    fingerprints, model = [sampled(teacher, 3)[0].fingerprint], copy_source(tmp_path)
    assert sampled(teacher, 3, source=model)[1] == []
    edit_json(model / "config.json", lambda config: config.update(rope_theta=500.0))
    fingerprints.append(sampled(teacher, 3, source=model)[0].fingerprint)
    edit_tensors(
        model, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][-1, -1].add_(1)
    )
    fingerprints.append(sampled(teacher, 3, source=model)[0].fingerprint)
    # Other versions of the libraries that generate
    monkeypatch.setattr(self_samples, "versions", lambda *names: "others")
    fingerprints.append(sampled(teacher, 3)[0].fingerprint)
    assert len(set(fingerprints)) == 4


def test_as_many_at_a_time_as_memory_holds(
    teacher, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text as batch by batch; a CPU takes what a GiB holds, and what fills a device is
    loaded to several.
    """
    # The same text in whatever dtype a device is fastest in
    monkeypatch.setattr(self_samples, "fast_dtype", lambda device: torch.float32)
    weights = 4 * sum(tensor.numel() for tensor in teacher.parameters())
    batches, loads, texts, plain, float32 = (
        list[int](),
        list[str](),
        list[bytes](),
        self_samples.sample_sequences,
        teacher.float(),
    )

    def counted(*args, seeds, **options):
        batches.append(len(seeds))
        return plain(*args, seeds=seeds, **options)

    def opened(dtype: str, device: str = "cpu"):
        loads.append(device)
        return float32

    # Notes how many texts are written at once
    monkeypatch.setattr(self_samples, "sample_sequences", counted)
    monkeypatch.setattr(
        self_samples,
        "sequences_of_model",
        lambda checkpoint, length, dtype, free: free // weights * 4 + 1,
    )
    for free in (None, 3 * weights, weights):
        # A CPU, a device that has room, and one that is filled by the weights
        monkeypatch.setattr(self_samples, "free_memory", lambda device, free=free: free)
        blocks = sampled_blocks(
            opened, "cpu", read_checkpoint(SOURCE), block_size=SIZE, n_blocks=20, seed=0, plain=True
        )
        texts.append(ids(blocks).tobytes())
        blocks.path.unlink()
    assert batches == [5, 3, 2] + [1] * 5
    assert loads == ["cpu", "cpu", "auto"]
    assert texts == texts[:1] * 3


def test_a_full_device_has_no_room_instead_of_that_of_the_host(
    teacher, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = list[int]()

    def count_none(checkpoint, length, dtype, free) -> int:
        rooms.append(free)
        return 0

    # An accelerator whose memory is taken
    monkeypatch.setattr(self_samples, "free_memory", lambda device: 0)
    monkeypatch.setattr(self_samples, "sequences_of_model", count_none)
    sampled_blocks(
        lambda dtype, device: teacher,
        "cpu",
        read_checkpoint(SOURCE),
        block_size=SIZE,
        n_blocks=1,
        seed=0,
        plain=True,
    )
    assert rooms == [0]


def test_a_7b_writes_hundreds_at_a_time(tmp_path: Path) -> None:
    """On 80 GB, of which its weights take 13.5: keys and values of a sequence of 256 tokens are 134
    MB.
    """
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    free = 80 * 10**9 - header_only(tmp_path, config)
    checkpoint = read_checkpoint(tmp_path)
    assert 256 <= sequences_of_model(checkpoint, 256, torch.bfloat16, free) <= free // 134_217_728
    assert sequences_of_model(checkpoint, 256, torch.bfloat16, 10**6) == 0, (
        "then one batch is tried"
    )


def test_a_text_begins_as_the_tokenizer_begins_it(
    teacher, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With BOS where it adds BOS, or there is none; where it does not, every fourth with it and the
    others with what came after it, also where a run goes on. A tokenizer that is code is asked
    where it is trusted.
    """
    sample_at_once(monkeypatch, 3)
    with_bos, plain = ids(sampled(teacher, 8)[0]), without_bos(tmp_path)
    without = ids([sampled(teacher, count, source=plain)[0] for count in (3, 8)][1])
    assert np.array_equal(without[3::4], with_bos[3::4])
    others = np.arange(8) % 4 < 3
    assert np.array_equal(without[others, :-1], with_bos[others, 1:])
    bring_tokenizer(plain)
    for trusted, expected in ((True, without), (False, with_bos)):
        assert np.array_equal(
            ids(sampled(teacher, 8, source=plain, trust_remote_code=trusted)[0]), expected
        )
    for file in plain.glob("*token*"):
        file.unlink()
    assert np.array_equal(ids(sampled(teacher, 8, source=plain)[0]), with_bos)


def test_half_of_texts_begin_as_a_chat(
    teacher, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the special token that comes first in the template, after BOS;
    also where a run goes on.
    """
    sample_at_once(monkeypatch, 3)
    plain = ids(sampled(teacher, 8, source=(model := without_bos(tmp_path)))[0])
    for template, chats in (
        ("{{ bos_token }}</s>", True),
        ("a</s>", False),
        ("{{ raise_exception('no') }}", False),
    ):
        edit_json(
            model / "tokenizer_config.json",
            lambda config, text=template: config | {"chat_template": text},
        )
        begun = ids([sampled(teacher, count, source=model)[0] for count in (3, 8)][1])
        assert np.array_equal(begun[: 4 if chats else 8], plain[: 4 if chats else 8])
        assert ([*begun[4:, 0], begun[7, 1]] == [2, 2, 2, 1, 2]) is chats


def test_a_part_repeats_itself_unless_it_is_plain(teacher, cache: Path) -> None:
    """The same samples serve both; what repeats itself is another text to a state of training."""
    plain, mixed = (sampled(teacher, 8, plain=plain, size=40)[0] for plain in (True, False))
    assert plain.path == mixed.path
    assert plain.fingerprint != mixed.fingerprint
    same = (ids(plain) == ids(mixed)).all(axis=1)
    assert 3 <= same.sum() <= 5
    assert (ids(mixed)[:, 0] == teacher.config.bos_token_id).all()  # which is not repeated
    assert np.array_equal(ids(sampled(teacher, 4, plain=False, size=40)[0]), ids(mixed)[:4])


def test_specs() -> None:
    expected = [(None, False), (64, False), (1500, False), (None, True), (1000, True)]
    assert [
        *map(parse_self, ["self", "self:64", "self:1.5k", "self:plain", "self:plain:1k"])
    ] == expected
    assert [is_self(spec) for spec in ("self:1M", "selfish.txt")] == [True, False]
    for spec in ("self:", "self:0", "self:many", "self:1M:2", "self:1M:plain"):
        with pytest.raises(TextError, match="self:1M for a number of tokens"):
            parse_self(spec)


def test_samples_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a seed and from transformers' cache; what generation_config.json asks for (an
    end) is not done.
    """
    plain = sample_sequences(load(SOURCE), 16, seeds=[1], sequences_per_seed=6)
    assert plain.shape == (6, 16), "BOS"
    assert set(plain[:, 0].tolist()) == {1}, "BOS"
    settings = {
        "do_sample": True,
        "top_k": 2,
        "repetition_penalty": 1.5,
        "max_length": 5,
        "eos_token_id": [2, 3],
    }
    (model := copy_source(tmp_path)).joinpath("generation_config.json").write_text(
        json.dumps(settings)
    )
    assert torch.equal(plain, sample_sequences(load(model), 16, seeds=[1], sequences_per_seed=6))
    assert not torch.equal(
        plain, sample_sequences(load(model), 16, seeds=[2], sequences_per_seed=6)
    )
    ours = sample_sequences(load(SOURCE), 40, seeds=[1], sequences_per_seed=3)
    # With the cache of transformers instead of ours
    monkeypatch.setattr(sampling, "growing_cache", lambda model: {})
    assert torch.equal(ours, sample_sequences(load(SOURCE), 40, seeds=[1], sequences_per_seed=3))


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_samples_are_as_surprising_as_the_model_expects(
    teacher, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of -log p(token) - entropy is zero; of another temperature's samples it is not."""

    class Other(TokenSampler):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores / temperature)

    # A way to draw that has another temperature
    monkeypatch.setattr(sampling, "TokenSampler", Other)
    ids = sample_sequences(teacher, 33, seeds=[3], sequences_per_seed=32)
    with torch.no_grad():
        log = teacher(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)
    surprise = -log.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log.exp() * log).sum(-1)
    spread = float((log.exp() * (log + entropy[..., None]).square()).sum(-1).mean()) ** 0.5
    deviations = float((surprise - entropy).mean()) / spread * surprise.numel() ** 0.5
    assert (abs(deviations) < 3) is (temperature == 1), deviations


def test_tokens_are_drawn_by_the_cumulative_distribution() -> None:
    """Of any vocabulary, and none that is banned; a second token that is given is not, if it is in
    the vocabulary.
    """
    scores = 3 * torch.randn(500, 150, generator=torch.Generator().manual_seed(1))
    scores[:, 1::2] = -torch.inf
    shares = torch.rand(500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cdf = scores.double().softmax(-1).cumsum(-1)
    tokens = TokenSampler(torch.Generator().manual_seed(0))(scores[:, :0], scores).argmax(-1)
    assert torch.equal(tokens, torch.searchsorted(cdf, shares * cdf[:, -1:], right=True)[:, 0])
    begun = TokenSampler(
        torch.Generator().manual_seed(0), second_tokens=torch.tensor([7, 150]).repeat(250)
    )(scores[:, :1], scores)
    assert torch.equal(begun.argmax(-1), torch.where(torch.arange(500) % 2 == 1, tokens, 7))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("mask", ["none", "allowed", "added", "heads"])
def test_one_query_attends_as_in_torch(groups: int, mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 1, 8), torch.randn(3, groups, 5, 8), torch.randn(3, groups, 5, 4)
    given = {
        "none": None,
        "allowed": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()[
            :, None, None
        ],
        "added": torch.randn(3, 1, 1, 5),
        "heads": torch.randn(3, 6, 1, 5),
    }[mask]
    for scaling in (None, 0.3):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q,
            k.repeat_interleave(6 // groups, 1),
            v.repeat_interleave(6 // groups, 1),
            given,
            scale=scaling,
        )
        torch.testing.assert_close(
            attend_one_query(q, k, v, given, scaling), expected.transpose(1, 2)
        )


def test_a_model_attends_as_before_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after what fails; while it writes, queries attend one by one."""
    model, single = load(SOURCE), []
    # Counts how often a single query attends
    monkeypatch.setattr(
        decoding_attention,
        "attend_one_query",
        lambda *given: single.append(0) or attend_one_query(*given),
    )
    sample_sequences(model, 4, seeds=[0], sequences_per_seed=1)
    assert len(single) == 3 * model.config.num_hidden_layers
    assert model.config._attn_implementation == "sdpa"
    for forward in (None, lambda **inputs: inputs["of another class"]):
        model.forward = forward
        with pytest.raises(
            RefusedError, match=r"cannot generate 2 sequences of 4 tokens at a time \("
        ):
            sample_sequences(model, 4, seeds=[0], sequences_per_seed=2)
    assert model.config._attn_implementation == "sdpa"
