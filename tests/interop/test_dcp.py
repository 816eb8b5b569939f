"""What torch's DCP has saved goes on here as it would have there, and the other way round. Pickles run no code."""

from __future__ import annotations

import errno
import io
import json
import logging
import pickle
import re
import resource
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from reprise.errors import CheckpointError, MismatchError
from reprise.ranks import single_rank_channel
from tests.harness import call_on_ranks, compose, curve, run_ok, tensor_files
from tests.interop import states
from tests.interop.dcp_producers import (
    GPT2,
    SAVED,
    TOTAL,
    batches,
    fsdp2_job,
    load_into,
    make,
    make_adamw,
    overrides_of,
    state_of,
    step,
    trained,
)
from tests.interop.states import assert_carried, opened, save_dcp, weights_of
from tests.messages import refused
from trainer.commands import convert
from trainer.interop.dcp.folder import open_folder
from trainer.interop.formats import ImportOptions
from trainer.interop.output import write_checkpoint
from trainer.interop.torch_file import read_torch_file
from trainer.launch.process_group import Cluster
from trainer.record.resume_rules import RULES, compared, differences
from trainer.run.build import describe_alone
from trainer.saves.targets import build_saves
from trainer.start.decide import decide

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# float32 sums in another order, on losses of about 5: two ranks differ by 5e-7, one by nothing.
BOUND = 1e-5
OURS = states.overrides_of("gpt2")
STATE = states.state_of("gpt2")
TABLE = "transformer.wpe.weight"


def bring_in(source: Path, run: Path, overrides: list[str], *more: str) -> Path:
    arguments = ["import", "dcp", str(source), str(run / "checkpoints"), "--trust-pickle", *more, *overrides]
    assert convert.main(arguments) == 0
    return run / f"checkpoints/iter_{SAVED:07d}"


def losses_of(run: Path) -> list[float]:
    return [float.fromhex(row[1]) for row in curve(run)]


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == TOTAL - SAVED
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= BOUND, (found, expected)


# ---- torch itself, on transformers' models


@pytest.mark.slow
def test_an_import_goes_on_with_the_losses_of_its_producer(tmp_path: Path) -> None:
    overrides = overrides_of("llama")
    config = compose(overrides)
    state, expected = trained(config, batches(config))
    save_dcp(tmp_path / "saved", states.as_torchtitan(state))
    bring_in(tmp_path / "saved", tmp_path, overrides)
    run_ok(tmp_path, overrides)
    assert_same(losses_of(tmp_path), expected)


@pytest.mark.slow
def test_two_ranks_of_fsdp2_save_for_us_and_load_our_export(tmp_path: Path) -> None:
    run_ok(tmp_path / "run", [*GPT2, f"checkpoint.save_interval={SAVED}"])
    assert (
        convert.main(["export", "dcp", str(tmp_path / f"run/checkpoints/iter_{SAVED:07d}"), str(tmp_path / "out")]) == 0
    )
    arguments = ["gpt2", str(tmp_path / "saved"), str(tmp_path / "out"), str(tmp_path / "losses.json")]
    ended = call_on_ranks(fsdp2_job, arguments, folder=tmp_path / "job", ranks=2, timeout_s=120)
    assert ended.ok, ended.text
    theirs, ours = json.loads((tmp_path / "losses.json").read_text())
    assert_same(ours, losses_of(tmp_path / "run")[SAVED:])
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    bring_in(tmp_path / "saved", tmp_path / "new", GPT2)
    run_ok(tmp_path / "new", GPT2)
    assert_same(losses_of(tmp_path / "new"), theirs)


@pytest.mark.parametrize("family", states.cases("gpt2", "llama, qwen3"))
def test_an_export_fills_transformers_and_returns_its_bytes(tmp_path: Path, family: str) -> None:
    state, overrides = states.state_of(family), states.overrides_of(family)
    config = compose(overrides)
    made = write_checkpoint(state, tmp_path / "made", config)
    assert convert.main(["export", "dcp", str(made), str(tmp_path / "out")]) == 0
    for flat in (False, True):
        model = make(config.model, seed=2)
        optimizer = make_adamw(model, config, lr=5.0)
        load_into(model, optimizer, tmp_path / "out", flat=flat)
        assert {group["lr"] for group in optimizer.param_groups} == {config.optimizer.lr}
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state.read(name))
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(value, state.read(f"{key}.{name}")), (key, name)
    alone = {"model": make(config.model, seed=2).state_dict()}  # and with nothing but what the model itself gives
    dcp.load(alone, checkpoint_id=tmp_path / "out", no_dist=True)
    path = bring_in(tmp_path / "out", tmp_path, states.ALONE)  # a config.json lies beside
    assert tensor_files(path) == tensor_files(made)


# ---- what an import takes and tells


def test_an_import_states_what_its_source_or_its_user_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = compose(OURS)
    model = make(config.model)
    optimizer = make_adamw(model, config)
    step(model, optimizer, torch.zeros(12, 17, dtype=torch.long))
    state = {**state_of(model, optimizer, flat=False), "iteration": 1, "epoch": 7}
    stated = [override for override in OURS if override.startswith(("model", "train."))]
    bring_in(save_dcp(tmp_path / "saved", state), tmp_path / "run", [*stated, "optimizer.weight_decay=0.2"])
    assert "not carried: epoch, param_groups\n" in caplog.text
    saved = json.loads((tmp_path / "run/checkpoints/iter_0000001/trainer_state.json").read_text())
    others = ["optimizer.adam_beta2=0.999", "schedule=constant", "train.seed=5", "train.threads=3", "optimizer.lr=0.5"]
    _, description = describe_alone(compose([*stated, *others, "optimizer.weight_decay=0.3"]))
    found = differences(*compared(saved, description, where="x"), RULES)
    assert [d.field for d in found] == ["adam.weight_decay"]

    run = compose([*OURS, f"run.dir={tmp_path / 'run'}"])
    cluster = Cluster(0, 1, torch.device("cpu"), 1, single_rank_channel(), "test")
    with build_saves(run, cluster) as saves:
        start = decide(run, cluster, saves)
    assert start.is_own


def test_bfloat16_prefixes_and_plain_steps_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {name: re.sub(r"(\.h\.\d+\.)", r"\1_orig_mod.", name) for name in weights_of(STATE)}  # compiled by layer
    weights = {f"module.{names[name]}": w.bfloat16() for name, w in weights_of(STATE).items()}
    moments = {
        other: {"step": SAVED, **{key: STATE.read(f"{key}.{name}") for key in states.MOMENTS}}
        for name, other in names.items()
    }
    optim = {"state": moments, "param_groups": [{"lr": 0.5, "betas": (0.8, 0.9), "params": list(moments)}]}
    folder = save_dcp(tmp_path / "in", {"app": {"net": weights, "adam": optim}, "sampler": {"position": 7}})
    with caplog.at_level(logging.INFO):
        source = opened("dcp", folder, OURS)
    assert "sampler" in caplog.text
    assert_carried(source, replace(STATE, read=lambda n: STATE.read(n).bfloat16() if n in names else STATE.read(n)))


def test_weights_beside_numbered_moments_come_in_if_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbered = {"state": {0: {key: torch.zeros(3) for key in states.MOMENTS}}, "param_groups": [{"params": [0]}]}
    folder = save_dcp(tmp_path / "in", {"model": weights_of(STATE), "optim": numbered})
    with refused(MismatchError, "--weights-only"):
        opened("dcp", folder, OURS)
    bring_in(folder, tmp_path, OURS, "--weights-only")
    assert "get_optimizer_state_dict" in caplog.text
    assert not (tmp_path / "checkpoints/iter_0000000/optimizer").exists()


REFUSED = {
    "more layers": (["model.n_layer=5"], "transformer.h.4.ln_1.weight"),
    "vocabulary": (["model.vocab_size=300"], "[300, 24]"),
    "family": (["model=llama3_tiny"], "model.embed_tokens.weight"),
    "untied": (["model.tie_word_embeddings=false"], "model.tie_word_embeddings=true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused_with_all_that_differs(tmp_path: Path, case: str) -> None:
    more, named = REFUSED[case]
    folder = save_dcp(tmp_path / "in", {"model": weights_of(STATE)})
    with refused(MismatchError, named):
        opened("dcp", folder, [*OURS, *more])


def test_two_tables_of_a_tied_model_are_refused(tmp_path: Path) -> None:
    weights = weights_of(STATE)
    both = {**weights, "lm_head.weight": weights["transformer.wte.weight"] + 1}
    source = opened("dcp", save_dcp(tmp_path / "two", {"model": both}), OURS)
    with refused(MismatchError, "model.tie_word_embeddings=false"):
        source.read("transformer.wte.weight")


def test_moments_of_a_part_of_the_model_are_refused(tmp_path: Path) -> None:
    moments = {name: {key: STATE.read(f"{key}.{name}") for key in states.MOMENTS} for name in weights_of(STATE)}
    kept = {name: value for name, value in moments.items() if "h.1" not in name}
    folder = save_dcp(tmp_path / "in", {"model": weights_of(STATE), "optim": {"state": kept}})
    with refused(MismatchError, "h.1.ln_1.weight.exp_avg"):
        opened("dcp", folder, OURS)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("__0.metadata", "use_collectives"),
        ("model.safetensors", "`hf`"),
        ("step-3/.metadata", "step-3"),
    ],
)
def test_a_similar_checkpoint_is_named(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    with refused(CheckpointError, advice):
        opened("dcp", tmp_path, OURS)


# ---- metadata


class Zone(Enum):
    """An enumeration of another program."""

    EAST = 1


class ByName(pickle.Pickler):
    """A pickler of Python 3.11.0 to 3.11.3, which pickles members of enumerations by their name."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_members_of_enumerations_come_by_their_names(tmp_path: Path) -> None:
    module = SimpleNamespace(__name__="by_name", Pickler=ByName)
    torch.save({"zone": Zone.EAST}, tmp_path / "state.pt", pickle_module=module)
    zone = read_torch_file(tmp_path / "state.pt")["zone"]
    assert "EAST" in str(zone)
    folder = save_dcp(tmp_path / "in", {"model": weights_of(STATE)})
    metadata, named = dcp.FileSystemReader(folder).read_metadata(), io.BytesIO()
    ByName(named).dump(metadata)
    assert b"getattr" in named.getvalue()
    (folder / ".metadata").write_bytes(named.getvalue())
    assert_same_tensors(folder, metadata)


@pytest.mark.parametrize("more", [(), ((2, 1),), ((2, 1), "blocked")], ids=["before 2.15", "2.15", "unknown"])
def test_metadata_of_every_torch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    folder = save_dcp(tmp_path / "in", {"model": weights_of(STATE)})
    metadata = dcp.FileSystemReader(folder).read_metadata()
    members = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda properties: members(properties)[:5] + more)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same_tensors(folder, metadata)


def assert_same_tensors(folder: Path, metadata: Metadata) -> None:
    tensors = open_folder(folder, ImportOptions(compose(OURS), trusts_pickle=True)).tensors
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = {(chunk.offset, chunk.shape) for chunk in tensors[key].chunks}
        assert (tensors[key].shape, tensors[key].dtype) == (entry.size, entry.properties.dtype)
        assert chunks == {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}


def test_chunks_with_a_gap_are_refused(tmp_path: Path) -> None:
    folder, key = save_dcp(tmp_path / "in", {"model": weights_of(STATE)}), f"model.{TABLE}"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size([entry.size[0] - 1, entry.size[1]]))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(CheckpointError, key):
        opened("dcp", folder, OURS)


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write_checkpoint(STATE, tmp_path / "made", compose(OURS))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        assert convert.main(["export", "dcp", str(made), str(tmp_path / "out")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"(errno {errno.EFBIG})" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
