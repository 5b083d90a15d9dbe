"""Models of transformers: what is pruned of them, what a folder may hold, labels of tokens, and adapters."""

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedrts
from fedrts import config, models
from fedrts.errors import InputError, Note
from fedrts.models import pretrained
from fedrts.runs.build import assemble
from fedrts.sparse.layout import Layout
from fedrts.tasks import Continuation, Language, TokenLabels, declared, judged_by
from fedrts.tasks.metrics import get

transformers = pytest.importorskip("transformers", reason="fedrts[text] is not installed")

WORDS = 53
STILL: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, **STILL}
BERT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT |= {"max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHORT: dict[str, Any] = {"data": "sentences", "data_options": {"stories": 60}, "rounds": 1, "clients": 3, "epochs": 1, "density": 0.4}
SHORT |= {"eval": {"fairness": False}}


def gpt2(**changes):
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes})).eval()


def bert(kind, **changes):
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**BERT, **changes})
    return getattr(transformers, f"BertFor{kind}")._from_config(config, attn_implementation="eager").eval()


def pruned(module, **more):
    return {entry.name for entry in Layout.of(module, pretrained.blocks_rule(module, **more)).layers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 with weights."""
    path = tmp_path_factory.mktemp("gpt2")
    gpt2().save_pretrained(path)
    return path


def tokens(seed, rows=12, length=10):
    """Tokens, the mask of those that are there, and labels with −100 for the others."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (rows, length), generator=random)
    there = torch.arange(length) < torch.randint(3, length + 1, (rows, 1), generator=random)
    return {"input_ids": ids * there, "attention_mask": there.long(), "labels": torch.where(there, ids, -100)}


# -- what is pruned ---------------------------------------------------------------------------------------------------


def test_linear_layers_of_blocks_are_pruned_and_a_tied_embedding_is_one_dense_tensor():
    model = gpt2()
    layout = Layout.of(model, pretrained.blocks_rule(model))
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert [entry.name for entry in layout.layers] == [f"transformer.h.{block}.{part}.weight" for block in (0, 1) for part in parts]
    tied = [entry for entry in layout.dense if "lm_head.weight" in entry.names]
    assert [entry.names for entry in tied] == [("transformer.wte.weight", "lm_head.weight")]
    assert layout.parameters == model.num_parameters()


def test_embeddings_norms_poolers_and_heads_are_not():
    names = pruned(bert("SequenceClassification"))
    assert len(names) == 2 * 6
    assert all("encoder.layer" in name for name in names)
    assert pruned(bert("SequenceClassification"), prune_output=True) - names == {"classifier.weight"}


def test_a_model_inside_another_keeps_its_rule_and_the_rest_the_usual_one():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.middle, self.out = bert("SequenceClassification").bert, nn.Linear(16, 16), nn.Linear(16, 3)

    names = pruned(Own())
    assert {name for name in names if not name.startswith("body.encoder.layer")} == {"middle.weight"}
    assert pretrained.blocks_rule(nn.Linear(2, 2)) is None


def test_of_adapters_the_adapters_alone_travel():
    peft = pytest.importorskip("peft", reason="fedrts[lora] is not installed")
    base = gpt2()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    rows = [tokens(seed) for seed in range(2)]
    result = fedrts.train(model=adapted, clients=rows, test=rows[0], task="language", method="fedavg", rounds=2, lr=0.1, engine="serial")
    adapters = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert len(result.state.weights) == adapters
    assert result.history[0]["upload_bytes"] < 2 * (4 * adapters + 200)
    after = {name.replace("base_layer.", ""): tensor for name, tensor in adapted.base_model.model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any(parameter.abs().sum() > 0 for name, parameter in adapted.named_parameters() if "lora_B" in name), "they have learned"


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_configuration_alone_begins_at_random_by_the_seed(tmp_path):
    transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    runs = [fedrts.run(**SHORT, model=f"hf:{tmp_path}", seed=seed, out=tmp_path / f"run{n}") for n, seed in enumerate((0, 0, 1))]
    assert type(runs[0].model).__name__ == "GPT2LMHeadModel"
    assert torch.equal(runs[0].state.weights, runs[1].state.weights)
    assert not torch.equal(runs[0].state.weights, runs[2].state.weights)
    assert runs[0].summary["perplexity"] > 1
    again = fedrts.load(tmp_path / "run0")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), runs[0].model.parameters(), strict=True))


def test_pretrained_weights_keep_the_largest_of_each_layer_and_their_size(folder):
    with pytest.warns(Note, match="pretrained weights: the first mask keeps the largest"):
        run = assemble(config.resolve(config.from_keywords({**SHORT, "model": f"hf:{folder}"})))
    assert run.experiment.topology.init_mask == "magnitude"
    state, _ = run.begun()
    given = run.layout.flatten(gpt2().state_dict())
    links = run.layout.links
    assert torch.equal(state.weights[links:], given[links:])
    assert torch.equal(state.weights[:links], given[:links] * state.mask.bits), "not scaled"
    first = run.layout.sizes[0]
    kept, left = (given[:first][bits].abs() for bits in (state.mask.bits[:first], ~state.mask.bits[:first]))
    assert kept.min() >= left.max()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        asked = config.from_keywords({**SHORT, "model": f"hf:{folder}", "topology": {"init_mask": "snip"}})
        assert assemble(config.resolve(asked)).experiment.topology.init_mask == "snip"


def test_options_are_keys_of_the_configuration_and_heads_fit_the_data(tmp_path):
    transformers.BertConfig(**BERT, architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    built: Any = models.get(f"hf:{tmp_path}")((10,), 7, num_hidden_layers=1)
    assert built(torch.ones(2, 10, dtype=torch.int64)).logits.shape == (2, 7)
    assert len(built.bert.encoder.layer) == 1
    masked = models.get(f"hf:{tmp_path}")((10,), WORDS, head="masked_lm")
    assert masked(torch.ones(2, 10, dtype=torch.int64)).logits.shape == (2, 10, WORDS)


def test_a_head_that_the_folder_lacks_begins_at_random(tmp_path):
    bert("SequenceClassification").save_pretrained(tmp_path)
    with pytest.warns(Note, match="has no tensors for classifier.bias and 1 more: they begin at random"):
        built: Any = models.get(f"hf:{tmp_path}")((10,), 5)
    assert built(torch.ones(1, 10, dtype=torch.int64)).logits.shape == (1, 5)
    assert torch.equal(built.bert.embeddings.word_embeddings.weight, bert("SequenceClassification").bert.embeddings.word_embeddings.weight)


RAN = "raise SystemExit('code of a folder was run')"


def with_config(path, **changes):
    (path / "config.json").write_text(json.dumps({**GPT2, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **changes}))
    (path / "own.py").write_text(RAN)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "code of its own, which is not run"),
        ({"model_type": "nothing"}, "does not know"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"backbone_config": {"use_pretrained_backbone": True}}, "a part elsewhere"),
        ({"architectures": ["GPT3"]}, "is no model that transformers"),
        ({"architectures": ["__version__"]}, "is no model that transformers"),
        ({"n_positions": 10}, "the model has 10 positions, too few for sequences of 23"),
        ({"vocab_size": 40}, "the model has 40 words and the data 53: set model_options.vocab_size = 53"),
    ],
)
def test_configurations_that_are_refused(change, message, tmp_path):
    path = with_config(tmp_path, **change)
    with pytest.raises(InputError, match=message) as caught:
        models.get(f"hf:{path}")((23,), WORDS)
    assert "\n" not in str(caught.value)


def test_code_of_a_folder_is_never_run(tmp_path):
    """A kind that transformers knows is built by its own class, whatever the folder says."""
    named = {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"}
    path = with_config(tmp_path, auto_map=named, attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    built: Any = models.get(f"hf:{path}")((23,), WORDS)
    assert type(built).__module__.startswith("transformers.")
    assert built.config._attn_implementation == "sdpa"


def test_pickles_adapters_and_what_is_no_folder_are_refused(tmp_path, folder):
    with pytest.raises(InputError, match="there is no such folder, and nothing is downloaded"):
        models.get("hf:gpt2")((23,), WORDS)
    with pytest.raises(InputError, match=r"cannot read config.json"):
        models.get(f"hf:{tmp_path}")((23,), WORDS)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(InputError, match="is no JSON"):
        models.get(f"hf:{tmp_path}")((23,), WORDS)
    with_config(tmp_path)
    torch.save(gpt2().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin, which is pickled"):
        models.get(f"hf:{tmp_path}")((23,), WORDS)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapters of PEFT"):
        models.get(f"hf:{tmp_path}")((23,), WORDS)
    with pytest.raises(InputError, match=r"unknown key 'model_options.layers'"):
        models.get(f"hf:{folder}")((23,), WORDS, layers=1)
    with pytest.raises(InputError, match=r"model_options.head must be auto, causal_lm"):
        models.get(f"hf:{folder}")((23,), WORDS, head="tail")
    with pytest.raises(InputError, match="names no path"):
        config.resolve({"model": "hf:"})


def test_the_path_is_written_down_whole(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert config.resolve({"data": "sentences", "model": f"hf:{folder.name}"}).model == f"hf:{folder}"
    assert config.foreign({"model": f"hf:{folder.name}"}) == [], "no code"


# -- labels of tokens -------------------------------------------------------------------------------------------------


def test_losses_are_those_of_transformers():
    batch = tokens(0)
    x = {name: part for name, part in batch.items() if name != "labels"}
    causal, masked = gpt2(loss_type="ForCausalLM"), bert("TokenClassification", num_labels=WORDS)
    causal.loss_type = "ForCausalLM"
    torch.testing.assert_close(Continuation().loss(causal, x, batch["labels"]), causal(**batch).loss)
    torch.testing.assert_close(TokenLabels().loss(masked, x, batch["labels"]), masked(**batch).loss)


def test_padding_counts_neither_in_losses_nor_in_metrics():
    batch = tokens(0)
    x = {name: part for name, part in batch.items() if name != "labels"}
    y = batch["labels"]
    model = bert("TokenClassification", num_labels=WORDS)
    found = TokenLabels(metrics=("accuracy", "f1")).evaluate(model, x, y, 5)
    with torch.no_grad():
        logits = model(**x).logits
    there = y != -100
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1)[there] == y[there]).float().mean()))
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits[there], y[there])), rel=1e-5)
    meter = get("f1")()
    meter.update(logits[there], y[there])
    assert found["f1"] == pytest.approx(meter.compute())
    whole = TokenLabels().evaluate(model, x, torch.full_like(y, -100), 5)
    assert whole["loss"] == 0
    assert TokenLabels().loss(model, x, torch.full_like(y, -100)) == 0


def test_a_square_of_tokens_and_classes_is_told_apart():
    """As many tokens as classes: the task knows which axis is which."""
    batch = tokens(0, length=6)
    model = bert("TokenClassification", num_labels=6)
    y = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 6)
    x = {name: part for name, part in batch.items() if name != "labels"}
    with torch.no_grad():
        right = model(**x).logits.argmax(-1) == y
    assert TokenLabels().evaluate(model, x, y, 12)["accuracy"] == pytest.approx(float(right[y != -100].float().mean()))


def test_the_task_is_guessed_from_the_model_and_its_labels():
    assert pretrained.task_name(gpt2(), tokens(0)["labels"]) == "language"
    assert pretrained.task_name(bert("TokenClassification"), tokens(0)["labels"]) == "tokens"
    assert pretrained.task_name(bert("SequenceClassification"), torch.zeros(3, dtype=torch.int64)) is None
    assert pretrained.task_name(nn.Linear(2, 2), tokens(0)["labels"]) is None


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_what_is_masked_changes_nothing():
    """Other words under the mask lead to the same bits; with another mask they do not."""

    def trained(junk, masked=True):
        rows = [tokens(seed) for seed in range(3)]
        for batch in rows:
            batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"] > 0, junk)
            if not masked:
                batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        return fedrts.train(
            model=bert("TokenClassification", num_labels=WORDS),
            clients=rows,
            test=rows[0],
            density=0.5,
            rounds=2,
            lr=0.1,
            batch_size=6,
            engine="serial",
        )

    first, second, third = trained(0), trained(7), trained(7, masked=False)
    assert torch.equal(first.state.weights, second.state.weights)
    assert not torch.equal(first.state.weights, third.state.weights)
    assert first.summary["accuracy"] is not None


def test_metrics_beside_those_of_language_see_the_tokens_that_count():
    batch = tokens(3)
    x, y, model = {"input_ids": batch["input_ids"]}, batch["labels"], gpt2()
    found = judged_by(Continuation(), ["f1"]).evaluate(model, x, y, 5)
    with torch.no_grad():
        logits = model(**x).logits[:, :-1]
    there = y[:, 1:] != -100
    meter = get("f1")()
    meter.update(logits[there], y[:, 1:][there])
    own = Continuation().evaluate(model, x, y, 5)
    assert found == {**own, "f1": pytest.approx(meter.compute())}
    names = [metric.name for metric in declared(judged_by(Language(padding=0), ["f1", "accuracy", "perplexity"]))]
    assert names == ["f1", "accuracy", "perplexity", "loss", "perplexity_corpus"], "f1 leads where accuracy is named after it"
    assert declared(judged_by(Language(), ["f1"]))[1].name == "accuracy"
    with pytest.raises(InputError, match="two metrics have the name 'f1'"):
        judged_by(Language(), ["f1", replace(get("f1"), label="another")])


@pytest.mark.filterwarnings("ignore::fedrts.errors.Note")
def test_a_decoder_gets_the_labels_as_transformers_shifts_them():
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    torch.manual_seed(0)
    t5 = transformers.T5Config(vocab_size=WORDS, **settings, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    rows = [tokens(seed) for seed in range(3)]
    given = {"clients": rows[1:], "test": rows[0], "density": 0.4, "rounds": 1}
    result = fedrts.train(model=t5, **given)
    with torch.no_grad():
        assert result.summary["loss"] == pytest.approx(float(result.model(**rows[0]).loss), rel=1e-4)
    assert result.masks, "blocks are pruned"
    assert not [name for name in result.masks if "shared" in name or "norm" in name or "bias" in name or "lm_head" in name]
    whole = fedrts.train(model=t5, **given, loss=lambda model, batch: model(**batch).loss)
    torch.testing.assert_close(whole.state.weights, result.state.weights, rtol=0, atol=1e-4)


def test_models_without_fused_attention_have_another():
    bloom = transformers.BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=1, n_head=2, architectures=["BloomForCausalLM"])
    for given, attention in ((bloom, "eager"), (transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"]), "sdpa")):
        model: Any = pretrained.from_python(given)
        assert model.config._attn_implementation == attention


def test_the_task_of_a_model_with_adapters_is_that_of_the_model():
    peft = pytest.importorskip("peft", reason="fedrts[lora] is not installed")
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    assert pretrained.task_name(adapted, tokens(0)["labels"]) == "language"


def test_a_language_of_dictionaries_is_one_of_tensors():
    """Labels that are the inputs are the same as targets that are shifted before."""
    batch = tokens(3)
    model = gpt2()
    shifted = Language(padding=-100).evaluate(model, batch["input_ids"][:, :-1], batch["labels"][:, 1:], 4)
    own = Continuation().evaluate(model, {"input_ids": batch["input_ids"]}, batch["labels"], 4)
    assert own == pytest.approx(shifted, rel=1e-5)


def test_models_by_configuration(folder):
    given = {"clients": [tokens(seed) for seed in range(2)], "test": tokens(9), "density": 0.5, "rounds": 1, "engine": "serial"}
    result = fedrts.train(model=transformers.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"]), **given)
    assert result.summary["perplexity"] > 1
    assert {name for name in result.masks if "wte" in name or "ln" in name} == set()
    fedrts.train(model=f"hf:{folder}", **given, topology={"init_mask": "magnitude"})
    with pytest.raises(InputError, match="names no architectures"):
        fedrts.train(model=transformers.GPT2Config(**GPT2), **given)
    with pytest.raises(InputError, match="models by name are for"):
        fedrts.train(model="mlp", **given)
