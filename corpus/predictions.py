"""What a model predicts, kept on a disk: in each place its most probable tokens, with the rest as one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import torch
from torch import Tensor

from gqa.checkpoint.write import replacing

Row = dict[str, np.ndarray[Any, Any]]

_NOTHING = -1e4  # the logarithm of a probability that is zero, also in float16


@dataclass(frozen=True)
class TopPredictions:
    """A model's most probable tokens in n places, k of them in all: `counts` (n,) of each place, `ids` and `logs`
    (k,), which are the logarithms of their probabilities, place after place, the most probable first; `rest` (n,): the
    logarithm of what all other tokens have together.
    """

    counts: Tensor
    ids: Tensor
    logs: Tensor
    rest: Tensor

    @staticmethod
    def of(logits: Tensor, mass: float, temperature: float = 1.0) -> TopPredictions:
        """Of each row of (n, V) logits as many as have the `mass` at that temperature; of a mass of 1 all."""
        # Among equals the first is first, as argmax has it.
        logs, ids = (logits.float() / temperature).log_softmax(-1).sort(stable=True, descending=True)
        before = logs.exp().cumsum(-1) - logs.exp()
        kept = (before < mass) | (mass >= 1)
        rest = logs.masked_fill(kept, -torch.inf).logsumexp(-1)
        return TopPredictions(kept.sum(-1), ids[kept], logs[kept].clamp_min(_NOTHING), rest.clamp_min(_NOTHING))

    def __getitem__(self, piece: slice) -> TopPredictions:
        begin, end = (int(self.counts[:at].sum()) for at in (piece.start, piece.stop))
        return TopPredictions(self.counts[piece], self.ids[begin:end], self.logs[begin:end], self.rest[piece])

    def stored(self, vocabulary: int) -> Row:
        """As it lies on a disk, in as few bits as the numbers need: `top_counts`, `top_ids`, `top_logs`, `top_rest`."""
        kinds = {"counts": np.int32, "ids": np.uint16 if vocabulary <= 1 << 16 else np.int32}
        return {
            f"top_{name}": tensor.cpu().numpy().astype(kinds.get(name, np.float16))
            for name, tensor in vars(self).items()
        }

    def beside(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What this says and what log-probabilities (n, V) say of the same: of the kept tokens, and of all others of a
        place as one: (k + n,) each: the places, these logarithms, and those of `q`.
        """
        every = torch.arange(len(q), device=q.device)
        rows = torch.repeat_interleave(every, self.counts)
        kept, places = (rows, self.ids.long()), torch.cat([rows, every])
        logs = torch.cat([self.logs.float(), self.rest.float()])
        total = logs.new_zeros(len(q)).index_add(0, places, logs.exp()).log()  # 1, but for what 16 bits round
        others = q.index_put(kept, q.new_tensor(_NOTHING)).logsumexp(-1)
        return places, logs - total[places], torch.cat([q[kept].clamp_min(_NOTHING), others])

    def divergence(self, other: Tensor, temperature: float = 1.0) -> Tensor:
        """T^2 KL(this || other) in nats at temperature T: (n, V) logits -> (n,).

        All tokens that are not kept count as one, for the other too. So it is less than the whole divergence by r x
        that of the two distributions among these tokens, r being their mass (the chain rule of relative entropy).
        """
        places, p, q = self.beside((other / temperature).log_softmax(-1))
        return temperature**2 * q.new_zeros(len(other)).index_add(0, places, p.exp() * (p - q))


@contextmanager
def writing(path: Path) -> Iterator[Callable[[Row], None]]:
    """A function that appends rows of the same names, each with arrays of any length, to a file that is there when it
    is whole. Where none is appended it is empty.
    """
    with replacing(path) as fresh, pyarrow.OSFile(str(fresh), "wb") as stream:
        writer = None

        def write(row: Row) -> None:
            nonlocal writer
            batch = pyarrow.record_batch(
                {
                    name: pyarrow.ListArray.from_arrays(np.array([0, len(v)], np.int32), pyarrow.array(v))
                    for name, v in row.items()
                }
            )
            writer = writer or pyarrow.ipc.new_file(stream, batch.schema)
            writer.write_batch(batch)

        yield write
        if writer:
            writer.close()


def open_rows(path: Path) -> Any:
    """The file that `writing` made, for `read_row`; its bytes are read when they are asked for."""
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))


def read_row(file: Any, number: int) -> Row:
    """A row as it was written."""
    row = file.get_batch(number)
    return {name: row.column(name).values.to_numpy(zero_copy_only=False) for name in row.schema.names}
