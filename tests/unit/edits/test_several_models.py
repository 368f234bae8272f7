"""Edits of checkpoints with several models, ties across what is edited, and names that are found in several places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rankless
from rankless.errors import FormatError, InvalidArgumentError, RanklessError
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.edit_oracle import Lm, Oracle, make_optimizer, train_steps


class TestOneOptimizerOfSeveralModels:
    """It names the parameters ``net/…``."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        net, ema = Lm(), Lm()
        optimizer = make_optimizer(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        train_steps(net, optimizer, [1])
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        rankless.save_checkpoint(tmp_path / "run", "a", {"net": net, "ema": ema}, optimizer, scheduler)
        return tmp_path / "run"

    def load(self, run: Path, edits: list[str], *shape: int, trained: Any = None) -> tuple[Lm, Any]:
        net, ema = Lm(*shape), Lm(*shape)
        optimizer = make_optimizer(net) if trained is None else trained(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        rankless.load_checkpoint(run, None, {"net": net, "ema": ema}, optimizer, scheduler, edit=edits)
        return net, optimizer

    def test_moments_follow_layers_and_rows(self, run: Path) -> None:
        before, its = self.load(run, ["cast float32"], 10, 3)
        net, optimizer = self.load(run, ["layers order=2,0,1", "resize-vocab 12"], 12, 3)
        for new, old in enumerate((2, 0, 1)):
            moment = optimizer.state[net.layers[new].mlp["up_proj"].weight]["exp_avg"]
            assert torch.equal(moment, its.state[before.layers[old].mlp["up_proj"].weight]["exp_avg"])
        assert optimizer.state[net.embed_tokens.weight]["exp_avg"].shape == (12, 4)
        train_steps(net, optimizer, [2])

    def test_dropped_and_frozen_parameters_leave_groups_and_schedulers(self, run: Path) -> None:
        def train_matrices(net: Lm) -> Any:
            return torch.optim.AdamW([p for p in net.parameters() if p.ndim > 1])

        _, optimizer = self.load(run, ["layers drop=0", "freeze *.norm.*,lm_head.bias"], 10, 2, trained=train_matrices)
        assert optimizer.param_groups[0]["lr"] == 0.5
        rankless.edit(run, run.parent / "copy", ["layers drop=0", "freeze *.norm.*,lm_head.bias"])
        shared = json.loads((run.parent / "copy/state.json").read_text())
        assert shared["scheduler"]["params"] == [group["params"] for group in shared["optimizer"]["groups"]]
        assert len(shared["scheduler"]["state"]["base_lrs"]) == 1

    def test_experts_and_what_is_unfrozen_get_states(self, run: Path, tmp_path: Path) -> None:
        rankless.edit(
            run,
            tmp_path / "copy",
            ["upcycle 2 router=zeros", "freeze lm_head.bias", "unfreeze lm_head.bias like=lm_head.weight"],
        )
        states = load_file(next((tmp_path / "copy/optimizer").glob("*.safetensors")))
        assert states["net/layers.0.mlp.router.weight/exp_avg"].shape == (2, 4)
        assert "net/layers.2.mlp.experts.1.up_proj.weight/exp_avg" in states
        assert not states["net/lm_head.bias/exp_avg"].any()


def test_each_model_has_an_optimizer_and_a_scheduler(tmp_path: Path) -> None:
    nets = {name: Lm() for name in "ab"}
    optimizers = {name: make_optimizer(net) for name, net in nets.items()}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(optimizer, 2) for name, optimizer in optimizers.items()}
    for name, net in nets.items():
        train_steps(net, optimizers[name], [1])
    rankless.save_checkpoint(tmp_path / "run", "x", nets, optimizers, schedulers)
    rankless.edit(tmp_path / "run", tmp_path / "copy", ["layers drop=0", "freeze *.norm.*,lm_head.bias"])
    shared = json.loads((tmp_path / "copy/state.json").read_text())
    for name in "ab":
        listed = [[key.removeprefix(f"{name}/") for key in group] for group in shared[f"scheduler/{name}"]["params"]]
        groups = [[key.removeprefix(f"{name}/") for key in g["params"]] for g in shared[f"optimizer/{name}"]["groups"]]
        assert listed == groups
        assert len(shared[f"scheduler/{name}"]["state"]["base_lrs"]) == 1


def test_equal_names_in_two_models_are_two_tensors(tmp_path: Path) -> None:
    fp8 = {name: {"l.weight": torch.full((4, 4), value).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(())}
           for name, value in (("net", 1.0), ("ema", 2.0))}  # fmt: skip
    rankless.save_checkpoint(tmp_path / "run", "x", fp8)
    made = {name: {"l.weight": torch.zeros(4, 4, dtype=torch.bfloat16)} for name in fp8}
    rankless.load_checkpoint(tmp_path / "run", model=made, edit=["dequantise"])
    assert [model["l.weight"][0, 0].item() for model in made.values()] == [1.0, 2.0]
    other = {"a": {"embed_tokens.weight": torch.ones(10, 2)}, "b": {"embed_tokens.weight": torch.ones(5, 2)}}
    rankless.save_checkpoint(tmp_path / "other", "x", other)
    with pytest.raises(InvalidArgumentError, match=r"10 rows, .* 5 rows: pass tensors="):
        rankless.edit(tmp_path / "other", tmp_path / "out", ["resize-vocab 12"])


class TestTies:
    def save_tied_layers(self, run: Path) -> None:
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        layers[1].weight = layers[2].weight = layers[0].weight
        rankless.save_checkpoint(run, "x", nn.ModuleDict({"layers": layers}))

    @pytest.mark.parametrize("edit", ["layers drop=0", "layers keep=2", "layers order=0,1,1"])
    def test_a_layer_does_not_lose_the_weight_that_another_one_stores(self, tmp_path: Path, edit: str) -> None:
        self.save_tied_layers(tmp_path / "run")
        with pytest.raises(InvalidArgumentError, match="are one tied parameter"):
            rankless.edit(tmp_path / "run", tmp_path / "out", [edit])

    def test_any_name_of_a_tied_parameter_may_be_used(self, tmp_path: Path) -> None:
        model = Lm(tied=True)
        optimizer = make_optimizer(model)
        train_steps(model, optimizer, [1])
        rankless.save_checkpoint(tmp_path / "run", "x", model, optimizer)
        edits = ["freeze lm_head.weight", "unfreeze lm_head.weight like=layers.0.mlp.up_proj.weight"]
        made = rankless.edit(tmp_path / "run", tmp_path / "out", [*edits, "resize-vocab 12 tensors=lm_head.*"])
        states = load_file(next((made / "optimizer").glob("*.safetensors")))
        assert states["embed_tokens.weight/exp_avg"].shape == (12, 4)
        assert not states["embed_tokens.weight/exp_avg"].any()

    def test_the_name_of_a_tie_is_not_given_to_another_tensor(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path / "run", "x", Lm(tied=True))
        with pytest.raises(InvalidArgumentError, match=r"would both be named 'layers\.0\.norm\.weight'"):
            rankless.edit(tmp_path / "run", tmp_path / "out", [r"rename lm_head\\.weight=layers.0.norm.weight"])


class TestStacks:
    @pytest.mark.parametrize(
        ("stack", "changed"), [("decoder.block", "num_decoder_layers"), ("encoder.block", "num_layers")]
    )
    def test_the_configuration_of_an_encoder_or_decoder(self, tmp_path: Path, stack: str, changed: str) -> None:
        tensors = {f"{side}.block.{n}.w": torch.ones(2) for side in ("encoder", "decoder") for n in range(3)}
        (tmp_path / "source").mkdir()
        save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
        config = {"num_layers": 3, "num_decoder_layers": 3}
        (tmp_path / "source/config.json").write_text(json.dumps(config))
        made = rankless.edit(tmp_path / "source", tmp_path / "out", [f"layers keep=0,1 stack={stack}"], to="hf")
        assert json.loads((made / "config.json").read_text()) == {**config, changed: 2}
        with pytest.raises(InvalidArgumentError, match="pass stack= with the whole name of one"):
            rankless.edit(tmp_path / "source", tmp_path / "o", ["layers keep=0 stack=block"], to="hf")

    def test_nested_stacks_are_the_outer_ones_in_an_average_too(self, tmp_path: Path) -> None:
        def make(count: int) -> nn.Module:
            inner = (nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))}) for _ in range(count))
            return nn.ModuleDict({"layers": nn.ModuleList(inner)})

        net = make(3)
        average = torch.optim.swa_utils.AveragedModel(net)
        rankless.save_checkpoint(tmp_path / "run", "x", {"net": net, "ema": average})
        smaller = make(2)
        its_average = torch.optim.swa_utils.AveragedModel(make(2))
        rankless.load_checkpoint(tmp_path / "run", None, {"net": smaller, "ema": its_average}, edit=["layers keep=0,2"])
        for model in (smaller, its_average.module):
            assert torch.equal(model["layers"][1]["layers"][2].weight, net["layers"][2]["layers"][2].weight)

    def test_a_sequence_without_a_name(self, tmp_path: Path) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        rankless.save_checkpoint(tmp_path / "run", "x", model)
        smaller = nn.Sequential(nn.Linear(2, 2))
        rankless.load_checkpoint(tmp_path / "run", model=smaller, edit=["layers keep=2"])
        assert torch.equal(smaller[0].weight, model[2].weight)


class Plain(torch.optim.Optimizer):
    """An optimizer that counts steps by a number of Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["m"] = state.get("m", torch.zeros_like(parameter)) + parameter.grad
                state["step"] = state["step"] + 1 if "step" in state else 1


def _save_without_states(run: Path, *, trains: str = "") -> None:
    model = Lm(layers=1)
    parameters = [parameter for name, parameter in model.named_parameters() if trains in name]
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    rankless.save_checkpoint(run, "x", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))


def test_routers_join_the_group_of_their_experts_if_an_optimizer_has_no_states(tmp_path: Path) -> None:
    _save_without_states(tmp_path / "run")
    rankless.edit(tmp_path / "run", tmp_path / "out", ["upcycle 2"])
    shared = json.loads((tmp_path / "out/state.json").read_text())
    groups = [group["params"] for group in shared["optimizer"]["groups"]]
    assert [*map(sorted, groups)] == shared["scheduler"]["params"]
    (group,) = (group for group in groups if "layers.0.mlp.router.weight" in group)
    assert "layers.0.mlp.experts.0.gate_proj.weight" in group
    _save_without_states(tmp_path / "frozen", trains="norm")
    rankless.edit(tmp_path / "frozen", tmp_path / "out2", ["upcycle 2"])
    assert "router" not in (tmp_path / "out2/state.json").read_text()


def test_parameters_without_states_are_frozen(tmp_path: Path) -> None:
    _save_without_states(tmp_path / "run")
    shown = invoke_json("edit", tmp_path / "run", "--dry-run", "freeze *norm*")
    assert "optimizer: layers.0.norm.bias: frozen, it has no states" in shown["changes"]
    rankless.edit(tmp_path / "run", tmp_path / "out", ["freeze *norm*"])
    assert "norm" not in (tmp_path / "out/state.json").read_text()
    assert "norm" in (tmp_path / "run/x/state.json").read_text()


def test_numbers_of_a_parameter_that_joins_are_zero(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = Plain([model[0].weight])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "x", model, optimizer)
    larger = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    its_optimizer = Plain(larger.parameters())
    edits = ["unfreeze 1.weight like=0.weight"]
    rankless.load_checkpoint(tmp_path / "run", model=larger, optimizer=its_optimizer, edit=edits)
    assert its_optimizer.state[larger[1].weight]["step"] == 0
    assert its_optimizer.state[larger[0].weight]["step"] == 1


def test_factors_of_a_square_embedding_are_told_apart_by_their_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 8)})
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model["embed"].weight] = {"exp_avg_sq_row": torch.ones(8), "exp_avg_sq_col": torch.ones(8)}
    rankless.save_checkpoint(tmp_path / "run", "x", model, optimizer)
    made = rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 10"])
    states = load_file(next((made / "optimizer").glob("*.safetensors")))
    assert (states["embed.weight/exp_avg_sq_row"].shape, states["embed.weight/exp_avg_sq_col"].shape) == ((10,), (8,))
    optimizer.state[model["embed"].weight] = {"factor": torch.ones(8)}
    rankless.save_checkpoint(tmp_path / "other", "x", model, optimizer)
    with pytest.raises(FormatError, match="no rule says"):
        rankless.edit(tmp_path / "other", tmp_path / "out2", ["resize-vocab 10"])


def test_a_new_run_from_another_one_is_edited_once(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "old", "x", Lm())
    options: dict[str, Any] = {"init_from": tmp_path / "old", "edit": ["layers order=2,1,0"]}
    for first in (True, False):
        model = Lm()
        with rankless.Checkpointer(tmp_path / "new", model=model, save_every=1) as checkpointer:
            began = checkpointer.resume(**options)
            if first:
                expected = model.layers[0].norm.bias.detach().clone() + 1
                with torch.no_grad():
                    model.layers[0].norm.bias += 1
            else:
                assert torch.equal(model.layers[0].norm.bias, expected)
            checkpointer.step(began + 1)


@pytest.mark.parametrize(
    "edit",
    [
        *("freeze include=a include=b", "rename layers", "", "resize-vocab 12 rows=normal:0.1 seed=4294967296"),
        *("layers keep=0-9999999", {"verb": "rename", "names": {"a": "\ud800"}}, "rename", "rename a{99999999999}=b"),
        *("cast bfloat16 include=nothing*", "cast bfloat16 include=layers.*,"),
        {"verb": "rename", "names": {"(" * 5000 + ")" * 5000: "a"}},
        {"verb": "resize-vocab", "size": 12, "rows": "normal:0.1", "seed": -1},
    ],
)
def test_more_edits_that_are_wrong_are_refused(tmp_path: Path, edit: Any) -> None:
    rankless.save_checkpoint(tmp_path / "run", "x", Lm())
    with pytest.raises(InvalidArgumentError):
        rankless.edit(tmp_path / "run", tmp_path / "out", [edit])


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "9" * 5000])
def test_recipes_that_no_parser_takes_are_refused(tmp_path: Path, text: str) -> None:
    rankless.save_checkpoint(tmp_path / "run", "x", Lm())
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(InvalidArgumentError, match="is no recipe"):
        rankless.edit(tmp_path / "run", tmp_path / "out", tmp_path / "r.toml")


class TestNumberedStates:
    """Optimizers of ``torch.save`` have numbers: what belongs to which parameter is not in the checkpoint."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        torch.manual_seed(1)
        model = Lm()
        optimizer = make_optimizer(model)
        train_steps(model, optimizer, [1])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    def test_a_dry_run_refuses_what_the_edit_refuses(self, file: Path) -> None:
        assert "has only the number" in invoke("edit", file, "--dry-run", "resize-vocab 12", code=2).stderr
        for option in ("--model-only", "--to=hf"):
            assert "10 to 12 rows" in invoke("edit", file, "--dry-run", option, "resize-vocab 12").stdout

    def test_do_not_follow_names_that_are_exchanged(self, file: Path, tmp_path: Path) -> None:
        swap = r"rename layers\.0=layers.x layers\.1=layers.0 layers\.x=layers.1"
        with pytest.raises(FormatError, match="has only the number"):
            rankless.edit(file, tmp_path / "out", [swap])
        assert not (tmp_path / "out").exists()
        rankless.edit(file, tmp_path / "out", [swap], model_only=True)

    @pytest.mark.parametrize("edit", ["layers keep=0", "resize-vocab 12", "upcycle 2 router=zeros"])
    def test_do_not_follow_parameters_that_move(self, file: Path, tmp_path: Path, edit: str) -> None:
        with pytest.raises(FormatError, match=r"has only the number.* model_only"):
            rankless.edit(file, tmp_path / "out", [edit])
        assert not (tmp_path / "out").exists()
        rankless.edit(file, tmp_path / "out", [edit], model_only=True)
        model = Lm(12) if "resize" in edit else Lm(layers=1)
        if "upcycle" not in edit:
            rankless.load_checkpoint(file, model=model, edit=[edit])
            with pytest.raises(FormatError, match="has only the number"):
                rankless.load_checkpoint(file, model=model, optimizer=make_optimizer(model), edit=[edit])

    @pytest.mark.parametrize("edit", [r"rename ^layers\.=blocks.", "cast bfloat16"])
    def test_stay_if_parameters_keep_their_places(self, file: Path, tmp_path: Path, edit: str) -> None:
        rankless.edit(file, tmp_path / "out", [edit])
        rankless.convert(file, tmp_path / "same", to="native")
        assert Oracle.read(tmp_path / "out").groups == Oracle.read(tmp_path / "same").groups
        assert Oracle.read(tmp_path / "out").states.keys() == Oracle.read(tmp_path / "same").states.keys()

    def test_are_averaged(self, file: Path, tmp_path: Path) -> None:
        rankless.edit(file, tmp_path / "out", [f"average paths={file} ", "cast float32"])
        states, before = (Oracle.read(path).states for path in (tmp_path / "out", self.converted(file, tmp_path)))
        assert all(torch.equal(states[name]["exp_avg"], before[name]["exp_avg"]) for name in before)

    def converted(self, file: Path, tmp_path: Path) -> Path:
        return rankless.convert(file, tmp_path / "same", to="native")


class TestStatesThatCannotFollow:
    def test_numbers_without_states_are_refused_too(self, tmp_path: Path) -> None:
        model = Lm()
        optimizer = torch.optim.SGD([{"params": [p], "lr": n + 1.0} for n, p in enumerate(model.parameters())])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
        for edit in ("layers order=2,1,0", "upcycle 2 router=zeros"):
            with pytest.raises(FormatError, match="has only the number"):
                rankless.edit(tmp_path / "a.pt", tmp_path / "out", [edit])
            assert not (tmp_path / "out").exists()
        rankless.edit(tmp_path / "a.pt", tmp_path / "rows", ["resize-vocab 12"])
        larger = Lm(12)
        groups = [{"params": [parameter], "lr": 0.0} for parameter in larger.parameters()]
        its_optimizer = torch.optim.SGD(groups)
        rankless.load_checkpoint(tmp_path / "rows", model=larger, optimizer=its_optimizer)
        assert [group["lr"] for group in its_optimizer.param_groups] == [n + 1.0 for n in range(len(groups))]
        rankless.load_checkpoint(tmp_path / "a.pt", model=Lm(), edit=["layers order=2,1,0"])
        with pytest.raises(FormatError, match="has only the number"):
            rankless.load_checkpoint(tmp_path / "a.pt", model=model, optimizer=optimizer, edit=["layers order=2,1,0"])
        with pytest.raises(InvalidArgumentError, match="names of parameters"):
            rankless.edit(tmp_path / "a.pt", tmp_path / "out", ["freeze *"])

    def test_one_vector_for_all_parameters(self, tmp_path: Path) -> None:
        model = Lm()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        tokens = torch.arange(8)

        def closure() -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
        for edit in ("layers keep=0", "freeze lm_head.bias", "resize-vocab 12"):
            with pytest.raises(RanklessError, match=r"all parameters together|with the names of parameters"):
                rankless.edit(tmp_path / "run", tmp_path / "out", [edit])
        rankless.edit(tmp_path / "run", tmp_path / "out", [r"rename ^layers\.=blocks."])
        assert any("blocks.0" in group for group in Oracle.read(tmp_path / "out").groups[0])


def test_models_of_other_depth_are_refused(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", {"big": Lm(layers=4), "small": Lm(layers=2)})
    with pytest.raises(InvalidArgumentError, match=r"model/small has 2 layers .* another model 4"):
        rankless.edit(tmp_path / "run", tmp_path / "out", ["layers keep=2,3"])


def test_a_head_with_other_rows_than_the_embedding_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(100, 4), "lm_head": nn.Linear(4, 128, bias=False)})
    rankless.save_checkpoint(tmp_path / "run", "a", model)
    with pytest.raises(InvalidArgumentError, match=r"100 rows.*128 rows.*pass tensors="):
        rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 200"])
    rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 200 tensors=embed_tokens.weight"])


def test_files_of_the_user_follow(tmp_path: Path) -> None:
    files = {"notes.txt": b"mine", "split.json": b"{}"}
    rankless.save_checkpoint(tmp_path / "run", "a", Lm(), files=files)
    for made in (
        rankless.edit(tmp_path / "run", tmp_path / "edited", ["cast bfloat16"]),
        rankless.convert(tmp_path / "run", tmp_path / "converted", to="native"),
    ):
        assert {name: (made / name).read_bytes() for name in files} == files


def test_a_step_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", Lm())
    with pytest.raises(InvalidArgumentError, match="step must be at most"):
        rankless.edit(tmp_path / "run", tmp_path / "out", ["cast bfloat16"], step=2**70)


def test_a_verb_that_is_no_list_is_named(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "x", Lm())
    with pytest.raises(InvalidArgumentError, match=r"pass verbs as a list, \['resize-vocab 12'\]"):
        rankless.edit(tmp_path / "run", tmp_path / "out", "resize-vocab 12")


class TestConfigurations:
    def write(self, folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def test_layers_that_predict_further_tokens_are_named(self, tmp_path: Path) -> None:
        tensors = {f"model.layers.{n}.w": torch.ones(2) for n in range(4)}
        source = self.write(tmp_path / "a", tensors, {"num_hidden_layers": 3, "num_nextn_predict_layers": 1})
        with pytest.raises(InvalidArgumentError, match="the last 1 of the 4 layers in model"):
            rankless.edit(source, tmp_path / "out", ["layers drop=0"], to="hf")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("style", ["mixtral", "qwen3-moe"])
    def test_an_architecture_is_not_given_to_a_part_of_a_model(self, tmp_path: Path, style: str) -> None:
        parts = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
        tensors = {f"model.layers.0.mlp.{part}.weight": torch.ones(shape) for part, shape in parts.items()}
        source = self.write(tmp_path / "a", tensors, {"text_config": {"intermediate_size": 6}})
        with pytest.raises(InvalidArgumentError, match=r"describes several parts \(text_config\)"):
            rankless.edit(source, tmp_path / "out", [f"upcycle 2 style={style}"], to="hf")
        whole = self.write(tmp_path / "b", tensors, {"hidden_size": 4})
        made = rankless.edit(whole, tmp_path / "made", [f"upcycle 2 style={style}"], to="hf")
        assert None not in json.loads((made / "config.json").read_text()).values()
