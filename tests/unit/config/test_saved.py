"""The configuration in a checkpoint holds the settings of a run, and no place and no topology."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from reprise.errors import CheckpointError, MismatchError
from tests.harness import compose
from tests.messages import refused
from trainer.config.compose import keys_from_environment
from trainer.config.saved import FORMAT, saved_config, saved_values, without_keys

CONFIG = compose(["model=llama3_8b", "schedule=wsd", "train.train_iters=50", "run.name=somewhere"])


def document(config: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "config": config}


def test_it_is_json_that_gives_back_every_value() -> None:
    sections = json.loads(json.dumps(saved_config(CONFIG)))
    values = saved_values(document(sections), {}, where="here")
    assert values["model.n_layer"] == 32
    assert values["model.rope_scaling"] == asdict(CONFIG.model.rope_scaling)  # type: ignore[arg-type]
    assert values["train.dtype"] == CONFIG.train.dtype.name
    assert len(values) == sum(len(section) for section in sections.values())
    assert values["schedule.lr_decay_iters"] == 50  # which a longer run keeps


def test_it_names_no_place_and_nothing_that_acts_once() -> None:
    found = saved_config(CONFIG)
    assert found.keys() == {"model", "data", "train", "optimizer", "schedule", "checkpoint", "logging"}
    assert "somewhere" not in json.dumps(found)
    once = {"save", "load", "ckpt_step", "finetune", "no_load_optim", "reshard", "override_data", "local"}
    assert not once & found["checkpoint"].keys()
    assert "cache" not in found["data"]


def test_text_with_the_form_of_an_expression_is_carried() -> None:
    config = replace(CONFIG, data=replace(CONFIG.data, path="a/${b}"))
    assert saved_values(document(saved_config(config)), {}, where="here")["data.path"] == "a/${b}"


def test_keys_that_are_gone_have_no_effect() -> None:
    logging = {"sinks": ["tensorboard"], "publish": "tensorboard"}
    gone = {"data": {"verify": "full", "vocab_size": 320, "kind": "datatrove"}, "logging": logging}
    values = saved_values(document(gone), {}, where="here")
    assert values == {"data.kind": "megatron", "logging.publish": None}


def test_the_parallel_layout_comes_from_the_state() -> None:
    state = {"topology": {"world_size": 8, "tp": 2, "pp": 2, "vpp": 1, "sp": True, "dp": 2, "zero_stage": 3}}
    values = saved_values(document({}), state, where="here")
    assert values == {
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.num_virtual_stages_per_pipeline_rank": 1,
        "parallel.zero_stage": 3,
    }


@pytest.mark.parametrize(
    ("other", "error", "name"),
    [
        ({"format": "reprise-run-config/2", "config": {}}, MismatchError, "reprise-run-config/2"),
        (document({"train": {"brand_new": 1}}), MismatchError, "train.brand_new"),
        (document({"checkpoint": {"save": "elsewhere"}}), MismatchError, "checkpoint.save"),
        (document({"train": 3}), CheckpointError, "here"),
    ],
    ids=["format", "a newer key", "a place", "no section"],
)
def test_another_document_is_refused(other: dict[str, Any], error: type[Exception], name: str) -> None:
    with refused(error, name):
        saved_values(other, {}, where="here")


@pytest.mark.parametrize(
    "text",
    [
        "${.name}",
        "${..run.name}",
        "${run[name]}",
        "${oc.select:run.name,other}",
        "${oc.decode:${oc.env:DATA}}",
        "${oc.select:'run.name'}",
        "${data.train[0].path}",
    ],
)
def test_keys_of_the_environment_are_found_in_every_form(text: str) -> None:
    table = {
        "run": {"name": "${oc.env:JOB}", "dir": text},
        "checkpoint": {"save": "${run.dir}/checkpoints", "load": "auto"},
        "data": {"train": [{"path": "${oc.env:DATA}/a"}, {"path": "b"}], "run": "run.name"},
        "model": {"n_kv_head": "${.n_head}", "n_head": 2, "name": "${model.n_head}"},
    }
    found = keys_from_environment(OmegaConf.to_yaml(OmegaConf.create(table)))
    assert found == {"run.name", "run.dir", "data.train", "checkpoint.save"}
    assert keys_from_environment("a: b\n") == set()


def test_keys_of_the_environment_are_left_out() -> None:
    nested = {"model": {"lora": {"rank": 3, "alpha": 1.0}, "bias": True}, "train": {"seed": 1, "train_iters": 2}}
    saved = without_keys(document(nested), {"model.lora.rank", "train.seed"})
    assert saved == document({"model": {"lora": {"alpha": 1.0}, "bias": True}, "train": {"train_iters": 2}})
