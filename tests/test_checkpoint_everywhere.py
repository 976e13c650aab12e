"""Use of finished checkpoints in other libraries: task heads, pipelines, truncation, ONNX, sentence-transformers."""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from test_families import config_of
from transformers import AutoTokenizer, pipeline

import train_mlm

HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
LONG = "The cat sees a small dog in the garden. " * 40
POSITIONS = {"roberta": 70, "bert": 72, "albert": 72, "modernbert": 72, "deberta-v2": 72}  # for text, of 72 rows


def needs(*packages):
    """A mark that skips a test if a package beyond requirements.txt is not installed."""
    missing = [name for name in packages if not find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


@pytest.fixture(params=POSITIONS)
def finished(request, preset, tmp_path):
    """(folder of a finished run, number of positions of its model)."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(request.param).to_dict()))
    train_mlm.main(["--config", preset, "--max_steps", "1"])
    return tmp_path / "run", POSITIONS[request.param]


def batch_of(folder, texts):
    """A batch padded on the right, truncated to the tokenizer's saved `model_max_length`."""
    return AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="pt")


def test_heads_take_a_text_of_any_length(finished):
    """The encoder's weights come from the checkpoint; the head, with its pooler, may be new."""
    folder, positions = finished
    batch = batch_of(folder, [LONG, "short"])
    assert batch["input_ids"].shape == (2, positions)
    for name in ("AutoModel", *(f"AutoModelFor{head}" for head in HEADS)):
        cls = getattr(transformers, name)
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        body = "" if name == "AutoModel" else f"{model.base_model_prefix}."
        missing = [key for key in info["missing_keys"] if key.startswith(body) and "pooler" not in key]
        assert not missing and not info["mismatched_keys"], (name, missing)
        several = {key: value[None] for key, value in batch.items()} if "Choice" in name else batch
        assert model.eval()(**several)[0].isfinite().all()


def test_pipelines(finished):
    folder, positions = finished
    of = {"model": str(folder), "tokenizer": str(folder), "device": "cpu"}
    assert len(pipeline("fill-mask", **of)("The <mask> sees.", top_k=3)) == 3
    long = {"tokenizer_kwargs": {"truncation": True}}
    assert len(pipeline("fill-mask", **of)(f"The <mask> sees. {LONG}", **long)) == 5
    assert pipeline("text-classification", **of)(LONG, truncation=True)[0]["score"] <= 1
    assert pipeline("token-classification", **of)(LONG)[0]["index"] == 1
    assert np.shape(pipeline("feature-extraction", **of)(LONG, truncation=True)) == (1, positions, 32)


@needs("onnx", "onnxscript", "onnxruntime")
def test_an_export_to_onnx_has_the_same_logits(finished, tmp_path, root, monkeypatch):
    """Exported as in docs/publishing.md; run at other lengths and with padding."""
    import onnxruntime

    folder, _ = finished
    page = (root / "docs/publishing.md").read_text(encoding="utf-8")
    (export,) = re.findall(r"^```python\n(import torch\n.*?)^```", page, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    exec(export.replace("runs/mine", str(folder)))
    session = onnxruntime.InferenceSession("model.onnx")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    for texts in (["dog"], ["The cat sees a dog.", "dog"], [LONG, "dog", "the sea"]):
        batch = batch_of(folder, texts)
        logits = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0]
        at = batch["attention_mask"].bool()  # in local attention, padding may attend to nothing
        torch.testing.assert_close(torch.from_numpy(logits)[at], model(**batch).logits[at], rtol=1e-4, atol=1e-4)


@needs("sentence_transformers")
def test_sentence_transformers(finished):
    import sentence_transformers as library

    folder, positions = finished
    model = library.SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == positions and np.isfinite(model.encode([LONG, "short"])).all()
