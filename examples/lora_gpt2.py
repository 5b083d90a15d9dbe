"""LoRA by PEFT: a small GPT-2 has learned a language; clients teach it another, in which adapters travel and the base stays.

`pip install 'fedrts[lora]'`, then `python examples/lora_gpt2.py`.
"""

import copy
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fedrts
from fedrts.data.sentences import VOCABULARY, sentences
from fedrts.errors import Note

Tokens = dict[str, Tensor]


def labelled(tokens: Tensor) -> Tokens:
    """As transformers has them: labels are the inputs, and −100 where a story has ended."""
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.where(tokens == 0, -100, tokens)}


def dialect(tokens: Tensor) -> Tensor:
    """The same stories in words that are called otherwise."""
    words = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(1, len(VOCABULARY)).flip(0)])
    return words[tokens]


def base(tokens: Tensor, steps: int) -> GPT2LMHeadModel:
    """A GPT-2 that knows the stories; one's own would come from `from_pretrained(FOLDER)`."""
    config = GPT2Config(vocab_size=len(VOCABULARY), n_embd=48, n_layer=2, n_head=4, n_positions=24, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        some = tokens[torch.randint(len(tokens), (32,), generator=torch.Generator().manual_seed(step))]
        nn.functional.cross_entropy(model(some[:, :-1]).logits.flatten(0, 1), some[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main(short: bool = False) -> None:
    """Adapters of rank 8 at half of their weights."""
    torch.manual_seed(0)
    stories = sentences()
    model = base(stories.x, 20 if short else 300)
    before = copy.deepcopy(model.state_dict())
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))

    heard = dialect(stories.x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Note)  # attention with masks trains one client after the other
        result = fedrts.train(
            model=adapted,
            clients=[labelled(part) for part in heard.chunk(8)],
            test=labelled(dialect(stories.test_x)),
            task="language",
            method="fedrts",
            density=0.5,
            rounds=3 if short else 20,
            per_round=4,
            eval={"every": 5, "fairness": False},
            train={"optimizer": "adam", "lr": 0.005, "epochs": 1 if short else 2, "batch_size": 16},
        )
    first, found = next(line["loss"] for line in result.history if line["loss"] is not None), result.summary
    frozen = {name.replace(".base_layer", "").removeprefix("base_model.model."): tensor for name, tensor in adapted.state_dict().items()}
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in before.items()), "the base stays"
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    sent = result.history[1]["upload_bytes"] / 4
    print(f"loss {first:.3f} to {found['loss']:.3f}, density {found['density']:.3f} of the adapters")
    print(f"a client sends {sent:,.0f} bytes a round; the model has {size:,}")
    assert sent < size / 5

    with tempfile.TemporaryDirectory() as folder:
        result.model.save_pretrained(folder)  # type: ignore[operator]  # of PEFT: the adapters alone
        bare = GPT2LMHeadModel(model.config)
        bare.load_state_dict(before)
        again = PeftModel.from_pretrained(bare, folder).eval()
        inputs = stories.test_x[:4]
        with torch.no_grad():
            torch.testing.assert_close(again(inputs).logits, result.model(inputs).logits, rtol=1e-5, atol=1e-5)
    assert found["loss"] < first if short else found["loss"] < 1.2


if __name__ == "__main__":
    main(short="--short" in sys.argv)
