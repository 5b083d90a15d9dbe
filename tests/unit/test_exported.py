"""Models elsewhere: what `fedrts export` writes is read again by whoever is to read it, and computes the same."""

from typing import Any

import pytest
import safetensors.torch
import torch

import fedrts
from fedrts import trees
from fedrts.errors import InputError, Note
from fedrts.export.formats import export_run

transformers = pytest.importorskip("transformers", reason="fedrts[text] is not installed")

WORDS = 53
STILL: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, **STILL}
SHORT: dict[str, Any] = {"data": "sentences", "data_options": {"stories": 60}, "rounds": 1, "clients": 3, "epochs": 1, "density": 0.4}
TOKENS = torch.randint(0, WORDS, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that began from one of transformers, whose output layer is tied to the embedding."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder / "gpt2")
    (folder / "gpt2" / "vocab.json").write_text("{}")
    with pytest.warns(Note, match="keeps the largest of each layer"):
        fedrts.run(**SHORT, model=f"hf:{folder / 'gpt2'}", out=folder / "run")
    return folder / "run"


def logits(module):
    with torch.no_grad():
        return trees.answer(module(TOKENS))


def test_a_folder_for_transformers(run, tmp_path):
    out = export_run(run, "transformers", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(model.eval()), logits(fedrts.load(run)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    masks = safetensors.torch.load_file(run / "masks.safetensors")
    assert masks
    assert all((model.get_parameter(name)[mask == 0] == 0).all() for name, mask in masks.items())
    assert (out / "vocab.json").exists(), "the tokenizer comes along"
    card = (out / "README.md").read_text("utf-8")
    for words in ("| begun from | hf:gpt2 |", "| rounds | 1 |", "Perplexity", "bytes |", "GPT2LMHeadModel.from_pretrained", "By client"):
        assert words in card
    assert str(tmp_path.parent) not in card, "no folders of whoever trained it"
    with pytest.raises(InputError, match="it is there already"):
        export_run(run, "transformers", out)


def test_a_program_of_torch(run, tmp_path):
    loaded = torch.export.load(export_run(run, "torch", tmp_path / "a.pt2")).module()
    torch.testing.assert_close(logits(loaded), logits(fedrts.load(run)), rtol=1e-5, atol=1e-5)


def test_a_program_of_torch_that_disagrees_is_not_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "allclose", lambda *_, **__: False)
    with pytest.raises(InputError, match=r"disagrees with the model .* nothing was written"):
        export_run(run, "torch", tmp_path / "a.pt2")
    assert not (tmp_path / "a.pt2").exists()


def test_onnx_of_8_bits_is_judged(run, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="fedrts[onnx] is not installed")
    whole = export_run(run, "onnx", tmp_path / "whole.onnx")
    with pytest.warns(Note, match=r"int8: accuracy 0\.\d+ on the test set, 0\.\d+ without"):
        small = export_run(run, "onnx", tmp_path / "small.onnx", value_type="int8")
    assert small.stat().st_size < whole.stat().st_size
    wanted = logits(fedrts.load(run))
    for file, most in ((whole, 1e-4), (small, 0.1)):
        (given,) = runtime.InferenceSession(file).run(None, {"input": TOKENS.numpy()})
        assert float((torch.from_numpy(given) - wanted).abs().max()) < most * max(1.0, float(wanted.abs().max()))


def test_our_gpt2_is_one_of_transformers(tmp_path):
    fedrts.run(**SHORT, model="tiny_gpt", model_options={"layers": 1, "width": 16}, out=tmp_path / "run")
    model = transformers.GPT2LMHeadModel.from_pretrained(export_run(tmp_path / "run", "transformers", tmp_path / "out")).eval()
    torch.testing.assert_close(logits(model), logits(fedrts.load(tmp_path / "run")), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_model_given_in_python_and_its_card(tmp_path):
    def site(seed):
        tokens = torch.randint(1, WORDS, (20, 8), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": (tokens[:, 0] > 26).long()}

    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": WORDS,
    }
    config = transformers.BertConfig(**sizes, max_position_embeddings=8, architectures=["BertForSequenceClassification"])
    given: dict[str, Any] = {"clients": {"Zürich|1": site(1), "北京": site(2)}, "test": site(9), "density": 0.8, "rounds": 1}
    result = fedrts.train(model=config, **given, out=tmp_path / "run")
    out = export_run(tmp_path / "run", "transformers", tmp_path / "out")
    again = transformers.BertForSequenceClassification.from_pretrained(out).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in result.model.state_dict().items())
    card = (out / "README.md").read_text("utf-8")
    for words in ("| data | given in Python |", r"| Zürich\|1 | 20 |", "| 北京 | 20 |", "### By class", "No differential privacy"):
        assert words in card


def test_of_other_models_there_is_no_folder(tmp_path):
    fedrts.run(data="digits", model="mlp", rounds=1, clients=3, epochs=1, out=tmp_path / "run")
    with pytest.raises(InputError, match="trained no model of transformers"):
        export_run(tmp_path / "run", "transformers", None)
    assert not (tmp_path / "run" / "transformers").exists()
