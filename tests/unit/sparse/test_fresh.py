"""Memory of long vectors: the same numbers as PyTorch's, in huge pages where the kernel has them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrts.sparse import fresh
from fedrts.sparse.mask import Mask

LONG = (1 << 20) + 3
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), (LONG,), (2, 4 * LONG)])
def test_zeros_and_copies_are_pytorchs(shape, dtype):
    like = torch.ones(1, dtype=torch.float64)
    zeros = fresh.zeros(shape, like, dtype)
    assert torch.equal(zeros, torch.zeros(shape, dtype=dtype))
    assert zeros.is_contiguous()
    copied = fresh.copy(zeros)
    copied += 1 if dtype != torch.bool else True
    assert torch.equal(copied, torch.ones(shape, dtype=dtype))
    assert not zeros.any(), "a copy is apart"
    assert fresh.empty(shape, like).dtype == torch.float64


def test_zeros_are_written_where_memory_was_used_before(monkeypatch):
    monkeypatch.setattr(np, "empty", lambda size, dtype: np.full(size, 1, dtype))
    assert not fresh.zeros((LONG,), torch.ones(1)).any()


def test_a_copy_may_have_another_type():
    assert torch.equal(fresh.copy(torch.arange(LONG), torch.float32), torch.arange(LONG).float())


def advised(address: int) -> bool:
    """Whether huge pages were asked for where this address is."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(not HUGE.exists(), reason="this kernel has no huge pages")
def test_long_memory_asks_for_huge_pages():
    like = torch.ones(1)
    links = 4 * LONG
    assert advised(fresh.empty((links,), like)[links // 2 :].data_ptr())
    mask = Mask(torch.zeros(links, dtype=torch.bool), (links,))
    assert advised(mask.expand(torch.ones(0))[links // 2 :].data_ptr())
