"""The method that CONTRIBUTING.md writes out works as it stands there."""

import re
from pathlib import Path

from fedrts import methods, rounds

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_method_runs(toy):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.S)
    exec(compile(code, str(GUIDE), "exec"), {"__name__": "example"})
    try:
        run = toy("set", "cnn")
        state = run.method.begin(run.setup)
        counts = state.mask.counts
        changed = []
        for step in rounds.play(run.plan, state, -1):
            assert step.state.mask.counts == counts
            changed.append(step.record.links_changed)
        assert changed[0] > 0
        assert changed[1] == 0
    finally:
        methods.methods._known.pop("set")
