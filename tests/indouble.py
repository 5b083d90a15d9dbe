"""A model in the kernels that compute active links alone, beside the same model in float64 autograd."""

import copy

import pytest
import torch

from fedrts.programs.program import Feed, LinkProgram
from fedrts.sparse.layout import Layout
from fedrts.sparse.mask import Mask
from fedrts.tasks import Classification

fedrts_kernels = pytest.importorskip("fedrts_kernels")
if not fedrts_kernels.FILE.exists():
    pytest.skip("fedrts-kernels has no library: there was no C compiler", allow_module_level=True)
ISAS = fedrts_kernels.load().isas
BEST = ISAS[-1]


class Case:
    """A model on a random mask with samples, in our kernels and in float64."""

    def __init__(self, module, shape, samples, density=0.5, task=None, isa=BEST, seed=0, targets=None, whole=0, unit="link"):
        torch.manual_seed(seed)
        self.module, self.task, self.samples = module, task or Classification(), samples
        self.layout = Layout.of(module, unit=unit)
        bits = self.layout.sizes.spread(torch.rand(sum(self.layout.sizes.arms)) < density)
        bits[: sum(self.layout.sizes[:whole])] = True
        self.mask = Mask(bits, self.layout.sizes)
        self.weights = self.layout.flatten(module.state_dict())
        self.weights[: self.layout.links] *= bits
        parameters = self.weights[self.layout.links : self.layout.parameters]
        parameters += 0.1 * torch.randn_like(parameters)  # gammas and biases that show
        self.x = torch.randn(samples + 3, *shape)
        with torch.no_grad():
            outputs = copy.deepcopy(module)(self.x).shape[1]
        self.y = torch.randint(0, outputs, (samples + 3,)) if targets is None else targets(samples + 3, outputs)
        self.rows = torch.randperm(samples + 3)[None, :samples]
        self.program = LinkProgram.read(module, self.layout, self.task, self.x[:2], self.y[:2], isa)

    @property
    def batches(self):
        return Feed(self.x, self.y, self.rows)

    def in_double(self, weights=None):
        """The module in float64 inside a vector, and its gradient vector."""
        return self.within(torch.float64, weights)

    def within(self, dtype, weights=None):
        """The module in numbers of this kind, inside a vector, and its gradient vector."""
        vector = (self.weights if weights is None else weights).to(dtype).clone()
        gradient = torch.zeros(self.layout.parameters, dtype=dtype)
        module = copy.deepcopy(self.module).to(dtype)
        self.layout.bind(module, vector, gradient)
        return module, vector, gradient

    def autograd(self, dtype=torch.float64):
        """Loss, and gradients and statistics on the mask, as PyTorch computes them."""
        module, vector, gradient = self.within(dtype)
        y = self.y[self.rows[0]]
        loss = self.task.loss(module.train(), self.x[self.rows[0]].to(dtype), y.to(dtype) if y.is_floating_point() else y)
        loss.backward()
        return loss.item(), self.mask.compact(torch.cat([gradient, vector[self.layout.parameters :]]))

    def check(self, rounding=0.0):
        """Loss, gradients on the mask, statistics, and outputs in evaluation; beside float32 autograd's own errors, so many times."""
        values = self.mask.compact(self.weights)
        found, loss = self.program.gradient(values, self.mask, self.batches)
        expected, full = self.autograd()
        single = self.autograd(torch.float32)[1] if rounding else full
        assert abs(float(loss) - expected) <= 1e-5 * max(1.0, abs(expected))
        sizes = [*self.mask.counts, *(entry.size for entry in self.layout.dense)]
        names = [entry.name for entry in self.layout.parameter_entries]
        scale = float(full[: len(found)].norm())
        parts = (part[: len(found)].split(sizes) for part in (found, full, single))
        for name, ours, theirs, rounded in zip(names, *parts, strict=True):
            allowed = 5e-5 * float(theirs.norm()) + 1e-5 * scale + rounding * float((rounded - theirs).norm())  # norms: rounding
            assert float((ours - theirs).norm()) <= allowed, name
        torch.testing.assert_close(values[len(found) :].double(), full[len(found) :], rtol=1e-5, atol=1e-5)
        outputs = self.program.outputs(values, self.mask, self.x)
        with torch.no_grad():
            theirs = self.in_double(self.mask.expand(values))[0].eval()(self.x.double())
        assert float((outputs - theirs).norm()) <= 1e-5 * float(theirs.norm())
