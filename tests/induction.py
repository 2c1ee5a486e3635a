"""A model that recalls, with weights set by hand: after two tokens that stood next to each other before, it says what
followed them then (Olsson et al., "In-context Learning and Induction Heads", 2022).

Layer 1: heads that look one or two tokens back, by the phases of rotary positions alone, and copy what stands there.
Layer 2: heads that look for the place whose two tokens before it are this token and the one before it, by what they are
in dimensions that rotary positions hardly turn, and copy the token that stands there.
Every head has a basis of its own, as heads of trained models do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, PAIRS, CONTENT = 4, 4, 64  # heads of a layer; pairs of dimensions that tell positions; numbers of a content
HEAD = 2 * (2 * PAIRS + CONTENT)
THETA = 1e36  # pair n turns by 10 ^ (-n / 2) a token: those behind twice PAIRS stand still
SHARP = 60.0
# Where things stand in the residual stream: what a token is, a number that is always 1, the tokens before, the answer.
TOKEN, ONE, BEFORE, BEFORE_THAT, ANSWER = 0, CONTENT, CONTENT + 1, 2 * CONTENT + 1, 3 * CONTENT + 1
WIDTH = 4 * CONTENT + 4  # a multiple of HEADS; the last are empty


def induction_model(vocabulary: int, positions: int) -> LlamaForCausalLM:
    """Two layers of attention whose MLPs add nothing, in float32."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=2, head_dim=HEAD,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    contents = torch.nn.functional.normalize(torch.randn(vocabulary, CONTENT), dim=-1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight[:, :CONTENT] = contents
        model.model.embed_tokens.weight[:, ONE] = 1.0
        model.lm_head.weight[:, ANSWER : ANSWER + CONTENT] = SHARP * contents
        # Squared lengths of the stream before each norm, which weights undo: token and 1, two tokens more, answer.
        norms = [model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm, model.model.norm]
        for norm, length in zip(norms, (2, 4, 5), strict=True):
            norm.weight.fill_(math.sqrt(length / WIDTH))
        for head in range(HEADS):
            _look_back(model.model.layers[0].self_attn, head, 1 + head % 2)
            _look_up(model.model.layers[1].self_attn, head)
    return model


def _rows(weight: Tensor, head: int) -> Tensor:
    return weight[head * HEAD : (head + 1) * HEAD]


def _still(head_dimension: int) -> Tensor:
    """Dimensions of a head that positions hardly turn."""
    half = head_dimension // 2
    return torch.tensor([n for n in range(head_dimension) if n % half >= 2 * PAIRS])


def _look_back(attention: torch.nn.Module, head: int, distance: int) -> None:
    """Scores are the sum of cos(w (n - distance)) over PAIRS frequencies w, n tokens back."""
    phase = torch.rand(PAIRS) * 2 * math.pi
    turns = 10.0 ** (-torch.arange(PAIRS) / 2) * distance
    for weight, angle in ((attention.q_proj.weight, phase - turns), (attention.k_proj.weight, phase)):
        own = _rows(weight, head)
        own[:PAIRS, ONE], own[HEAD // 2 : HEAD // 2 + PAIRS, ONE] = angle.cos(), angle.sin()
        own *= math.sqrt(SHARP * math.sqrt(HEAD))
    _copy(attention, head, BEFORE if distance == 1 else BEFORE_THAT, HEADS // 2)


def _look_up(attention: torch.nn.Module, head: int) -> None:
    """Scores are the products of this token and the one before it with the two before another place."""
    basis = torch.linalg.qr(torch.randn(2 * CONTENT, 2 * CONTENT))[0] * math.sqrt(SHARP * math.sqrt(HEAD))
    for weight, parts in ((attention.q_proj.weight, (TOKEN, BEFORE)), (attention.k_proj.weight, (BEFORE, BEFORE_THAT))):
        own = _rows(weight, head)
        for number, part in enumerate(parts):
            own[_still(HEAD), part : part + CONTENT] = basis[:, number * CONTENT : (number + 1) * CONTENT]
    _copy(attention, head, ANSWER, HEADS)


def _copy(attention: torch.nn.Module, head: int, place: int, heads: int) -> None:
    """What is looked at is written to a place, by each of so many heads in part."""
    basis = torch.linalg.qr(torch.randn(HEAD, CONTENT))[0]
    _rows(attention.v_proj.weight, head)[:, TOKEN : TOKEN + CONTENT] = basis
    attention.o_proj.weight[place : place + CONTENT, head * HEAD : (head + 1) * HEAD] = basis.T / heads
