"""One client's work in progress: its tensors, its batches and passes over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedrts.sparse.mask import Mask

if TYPE_CHECKING:
    from fedrts.client.workbench import Workbench


@dataclass(frozen=True)
class Batch:
    """The data rows of one step."""

    rows: Tensor
    key: int | None = None
    """Key of its augmentation; None: it is not augmented."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Job:
    """One client's work in progress."""

    bench: Workbench
    tensors: dict[str, Tensor]
    mask: Mask
    rows: Tensor
    key: int
    round_index: int = 0
    loss: Tensor | float = 0.0
    steps: int = 0

    @property
    def weights(self) -> Tensor:
        return self.tensors["weights"]

    @property
    def samples(self) -> int:
        """The number of samples in the batches of an epoch."""
        rows, size = len(self.rows), self.bench.training.batch_size
        return 0 if rows == 1 < size and self.bench.has_batchnorm else rows // size * size or rows

    def batches(self, epoch: int) -> Iterator[Batch]:
        return self.bench.batches(self.rows, self.key, epoch)

    def loss_on(self, batch: Batch, temperature: float = 1.0, twice: bool = False) -> Tensor:
        """Return the mean loss of a batch; `twice`: its gradient will be differentiated again."""
        bench = self.bench
        x, y = bench.data.training_batch(batch.rows, batch.key)
        return bench.data.task.loss(bench.module, x, y, temperature=temperature, twice=twice)

    def backward(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Compute the loss on a batch, and its gradient in `bench.gradient [N_all]`."""
        self.bench.gradient.zero_()
        loss = self.loss_on(batch, temperature)
        loss.backward()
        return loss.detach()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Train-mode passes that leave the weights and BatchNorm statistics unchanged."""
        self.bench.module.train()
        with self.same_buffers():
            yield

    @contextmanager
    def same_buffers(self) -> Iterator[None]:
        """Restore every buffer of the module: statistics, and batch counts that are not part of the vector."""
        before = [(buffer, buffer.clone()) for buffer in self.bench.module.buffers()]
        yield
        for buffer, value in before:
            buffer.copy_(value)

    def candidates(self, name: str) -> Iterator[None]:
        """Load one candidate mask of the tensor `name` after the other; restore the client's own weights at the end."""
        kept = self.weights.clone()
        for bits in self.tensors[name]:
            self.weights[: len(bits)].masked_fill_(~bits, 0.0)
            with self.same_buffers():
                yield
            self.weights.copy_(kept)
