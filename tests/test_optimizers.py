"""LAMB and Muon: updates equal the published ones; runs resume; unsupported combinations."""

import pytest
import torch
from torch import nn

import train_mlm
from roberta_recipe.errors import InputError
from roberta_recipe.training import optimizers, pretraining
from roberta_recipe.training.arguments import MlmTrainingArguments
from roberta_recipe.training.optimizers import build

SAVING = ["--save_strategy", "steps", "--save_steps", "2"]


class Layers(nn.Module):
    """An embedding, two layers of a matrix and a bias, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.head = nn.Linear(4, 7)


def arguments(tmp_path, optim, **values):
    return MlmTrainingArguments(
        output_dir=str(tmp_path), max_steps=5, use_cpu=True, optim=optim, learning_rate=0.01, **values
    )


def stepped(model, optimizer, steps=3):
    """Random gradients of each step, by name of the weight."""
    torch.manual_seed(1)
    drawn = []
    for _ in range(steps):
        drawn.append({name: torch.randn_like(weight) for name, weight in model.named_parameters()})
        for name, weight in model.named_parameters():
            weight.grad = drawn[-1][name].clone()
        optimizer.step()
    return drawn


@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_lamb_is_algorithm_2_of_its_paper(tmp_path, decay):
    """Without bias correction and limits of the norm, and without trust ratio for undecayed weights, as in the code of
    LAMB's and ALBERT's authors."""
    args = arguments(tmp_path, "lamb", weight_decay=decay)
    torch.manual_seed(0)
    model = Layers()
    nn.init.normal_(model.head.weight, std=10)  # a norm above 10
    expected = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
    decayed = [name for name in expected if name.endswith("weight")]
    gradients = stepped(model, build(args, model, decayed))
    for name, weight in expected.items():
        mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in gradients:
            gradient = step[name].double()
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.98 * square + 0.02 * gradient**2
            update = mean / (square.sqrt() + 1e-6) + (decay if name in decayed else 0.0) * weight
            ratio = weight.norm() / update.norm() if name in decayed else 1.0
            weight -= 0.01 * ratio * update
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach().double(), expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(tmp_path, bf16, adjust, monkeypatch):
    """Each weight is updated as by its optimizer alone, with its own learning rate and decay. Muon's products have the
    run's precision: PyTorch's are in bf16, and the reference for fp32 is PyTorch's code without that conversion."""
    options = f"lr=0.05,weight_decay=0.2,momentum=0.9,ns_steps=4,adjust_lr_fn={adjust}"
    args = arguments(tmp_path, "muon", weight_decay=0.1, bf16=bf16, optim_args=options)
    torch.manual_seed(0)
    model, alone = Layers(), Layers()
    alone.load_state_dict(model.state_dict())
    decayed = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    stepped(model, build(args, model, decayed))
    of_layers = {"layers.0.weight", "layers.1.weight"}
    named = dict(alone.named_parameters())
    options = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "ns_steps": 4, "adjust_lr_fn": adjust}
    muon = torch.optim.Muon([named[name] for name in sorted(of_layers)], **options)
    common = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6}
    biases = [named[name] for name in named if name not in decayed]
    rest = [{"params": [named[name] for name in decayed if name not in of_layers], "weight_decay": 0.1}]
    adamw = torch.optim.AdamW([*rest, {"params": biases, "weight_decay": 0.0}], **common)
    if not bf16:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(1)
    for _ in range(3):
        for weight in alone.parameters():
            weight.grad = torch.randn_like(weight)
        muon.step()
        adamw.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, named[name], rtol=0, atol=0 if bf16 else 1e-6, msg=name)


def test_the_matrices_are_those_of_every_familys_layers():
    from test_families import CONFIGS, config_of

    from roberta_recipe.model.masked_lm import masked_lm_class

    for name in CONFIGS:
        config = config_of(name)
        with torch.device("meta"):
            model = masked_lm_class(config)(config)
        matrices = {id(weight) for weight in optimizers.matrices_of_layers(model)}
        names = [key for key, weight in model.named_parameters() if id(weight) in matrices]
        shared = name == "albert"  # whose two layers are one
        assert len(names) >= (1 if shared else 2) * 4, (name, names)
        assert not [key for key in names if "embed" in key or key.startswith(("cls.", "lm_", "predictions"))], names


def test_a_resumed_run_keeps_both_rates(preset, tmp_path):
    words = ["--config", preset, *SAVING, "--optim", "muon", "--optim_args", "lr=0.03,adjust_lr_fn=match_rms_adamw"]
    train_mlm.main(words)
    groups = torch.load(tmp_path / "run" / "checkpoint-2" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["initial_lr"] for group in groups] == [1e-3, 1e-3, 0.03]
    assert groups[2]["lr"] == pytest.approx(0.03 * groups[0]["lr"] / 1e-3) and groups[2]["momentum"] == 0.95
    resume = ["--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-2"), "--output_dir", str(tmp_path / "b")]
    changed = [*resume, "--resume_despite_changes", "true", "--learning_rate", "2e-3"]
    train_mlm.main([*words, *changed, "--optim_args", "lr=0.01,momentum=0.9,adjust_lr_fn=match_rms_adamw"])
    groups = torch.load(tmp_path / "b" / "checkpoint-4" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["initial_lr"] for group in groups] == [2e-3, 2e-3, 0.01] and groups[2]["momentum"] == 0.9
    with pytest.raises(InputError, match="the state of another optimizer"):
        train_mlm.main([*words, *changed, "--optim", "lamb", "--optim_args", "", "--output_dir", str(tmp_path / "c")])


def test_lamb_does_not_adapt_to_what_keeps_padding_out(preset, tmp_path):
    """The biases of 48 padded vocabulary rows have a norm of 7e4, which would scale the updates of the others."""
    flags = ["--config", preset, "--optim", "lamb", "--max_steps", "12", "--logging_steps", "12"]
    plain = train_mlm.main([*flags, "--output_dir", str(tmp_path / "plain")])
    padded = train_mlm.main([*flags, "--output_dir", str(tmp_path / "padded"), "--pad_vocab_to_multiple_of", "64"])
    assert padded["metrics"]["eval_loss"] == pytest.approx(plain["metrics"]["eval_loss"], rel=0.01)


@pytest.mark.parametrize("optim", [*optimizers.custom_names(), "adagrad"])
def test_zero_is_refused(optim, preset, monkeypatch):
    (_, args), _ = train_mlm.read_arguments(["--config", preset, "--optim", optim])
    pretraining.check_training(args)
    args.deepspeed_plugin = object()
    with pytest.raises(InputError, match=f"optim={optim}: ZeRO flattens .*; use adamw_torch, or start without"):
        optimizers.check(args)


WSD = ["--max_steps", "10", "--warmup_steps", "2", "--lr_scheduler_type", "warmup_stable_decay"]
WSD += ["--lr_scheduler_kwargs"]


def test_a_trapezoid_fills_the_run(preset):
    (_, args), _ = train_mlm.read_arguments(["--config", preset, *WSD, '{"num_decay_steps": 8}'])
    pretraining.check_training(args)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim", "lamb", "--optim_args", "lr=1"], "optim=lamb .*: unknown argument lr"),
        (["--optim", "muon", "--optim_args", "nesterov=0"], "optim=muon .*: unknown argument nesterov"),
        (["--optim", "muon", "--optim_args", "adjust_lr_fn=mine"], "mine is not supported"),
        (["--optim", "lamb", "--adam_beta1", "1.0"], "optim=lamb with .*: .*[Bb]eta"),
        ([*WSD, '{"num_decay_steps": 9}'], "10 steps, 2 of them warm-up; .* from 1 to 8; the stable phase"),
        ([*WSD, '{"num_decay_steps": 5, "num_stable_steps": 1}'], "num_decay_steps alone"),
        ([*WSD, '{"num_decay_steps": 0.2}'], "a whole number from 1 to 8"),
    ],
)
def test_bad_input(preset, words, message):
    with pytest.raises(InputError, match=message):
        (_, args), _ = train_mlm.read_arguments(["--config", preset, *words])
        pretraining.check_training(args)
