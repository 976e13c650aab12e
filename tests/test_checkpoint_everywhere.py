"""Finished checkpoints in other libraries' hands: task heads, pipelines, truncation, ONNX, sentence-transformers."""

import json

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


@pytest.fixture(params=POSITIONS)
def finished(request, preset, tmp_path):
    """(folder of a finished run, positions of its model)."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(request.param).to_dict()))
    train_mlm.main(["--config", preset, "--max_steps", "1"])
    return tmp_path / "run", POSITIONS[request.param]


def batch_of(folder, texts):
    """Padded on the right, and truncated to the length that the tokenizer was saved with."""
    return AutoTokenizer.from_pretrained(folder)(texts, padding=True, truncation=True, return_tensors="pt")


def onnx_error(model, folder, path):
    """The largest difference of logits between `model` and its export, at other lengths and with padding."""
    runtime = pytest.importorskip("onnxruntime")
    inputs = dict(batch_of(folder, ["A dog.", "The cat sees."]))
    shapes = {name: dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC) for name in inputs}
    torch.onnx.export(model, (), path, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    session, errors = runtime.InferenceSession(path), []
    for texts in (["dog"], ["The cat sees a dog.", "dog"], [LONG, "dog", "the sea"]):
        batch = batch_of(folder, texts)
        logits = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0]
        errors.append(np.abs(logits - model(**batch).logits.detach().numpy()).max())
    return max(errors)


def test_heads_take_a_text_of_any_length(finished):
    """The encoder's weights are those of the checkpoint; the head, and the pooler in it, may be fresh."""
    folder, positions = finished
    batch = batch_of(folder, [LONG, "short"])
    assert batch["input_ids"].shape == (2, positions)
    for name in ("AutoModel", *(f"AutoModelFor{head}" for head in HEADS)):
        cls = getattr(transformers, name)
        if type(config := transformers.AutoConfig.from_pretrained(folder)) not in cls._model_mapping:
            assert (config.model_type, name) == ("deberta-v2", "AutoModelForMultipleChoice") or "modernbert" in name
        model, info = cls.from_pretrained(folder, output_loading_info=True)
        of_encoder = {key for key in info["missing_keys"] if key.startswith(model.base_model_prefix) or cls is AutoModel}
        assert not [key for key in of_encoder if "pooler" not in key] and not info["mismatched_keys"]
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


def test_export_to_onnx(finished, tmp_path):
    pytest.importorskip("onnxscript")
    folder, _ = finished
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert onnx_error(model, folder, tmp_path / "model.onnx") < 1e-4


def test_sentence_transformers(finished):
    library = pytest.importorskip("sentence_transformers")
    folder, positions = finished
    model = library.SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == positions and np.isfinite(model.encode([LONG, "short"])).all()
