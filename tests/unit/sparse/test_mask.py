import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrts.sparse.mask import Mask


@st.composite
def masks(draw):
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    bits = draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes)))
    return Mask(torch.tensor(bits), sizes)


@given(masks(), st.integers(0, 5), st.integers(0, 3))
def test_compact_and_expand_are_inverse_on_the_mask(mask, rest, clients):
    shape = (clients, len(mask.bits) + rest) if clients else (len(mask.bits) + rest,)
    vector = torch.randn(shape)
    compact = mask.compact(vector)
    assert compact.shape[-1] == mask.number + rest
    full = mask.expand(compact)
    kept = torch.cat([mask.bits, torch.ones(rest, dtype=torch.bool)])
    assert torch.equal(full, torch.where(kept, vector, torch.zeros(())))
    assert torch.equal(mask.compact(full), compact)


@given(masks())
def test_counts_and_indices(mask):
    assert mask.counts == tuple(int(part.sum()) for part in mask.bits.split(list(mask.sizes)))
    assert torch.equal(mask.active.sort().values, mask.bits.nonzero().squeeze(-1))
    assert sorted(mask.active.tolist() + mask.inactive.tolist()) == list(range(len(mask.bits)))


def test_expanded_values_are_the_receivers_own():
    full = Mask.full([4])
    values = torch.zeros(6)
    full.expand(values)[0] = 1
    full.compact(values)[1] = 1
    assert values.count_nonzero() == 0


def test_gained_counts_new_links_only():
    before, after = (Mask(torch.tensor(bits, dtype=torch.bool), [4]) for bits in ([1, 1, 0, 0], [1, 0, 1, 0]))
    assert after.gained(before) == 1
    assert before.gained(before) == 0
