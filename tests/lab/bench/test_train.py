"""Laws of the benchmark of a training step: it checks before it times, and says what it skips."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from lab.__main__ import app
from lab.bench import train
from lab.bench.train import Settings, Variant, bench_train, table_of
from typer.testing import CliRunner

from foveate.nn.pixel_dit import MODELS

CPU = Settings(torch.device("cpu"), dit="tiny", rounds=2)
NAMES = ["dense", "top-k", "llsa", "llsa-2"]


@pytest.fixture(autouse=True)
def a_tiny_model_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", {"num_layers": 1, "num_attention_heads": 1})
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def measure(sides=(24,), names=NAMES, settings=CPU):
    *_, result = bench_train(sides, names, settings)
    return result


TITLES = "dense, PyTorch's choice", "top-k, 1 level", "LLSA, 1 level", "LLSA, 2 levels"


@pytest.mark.parametrize(("checkpointing", "names"), [(False, NAMES), (True, ["dense", "llsa-2"])])
def test_every_variant_is_checked_and_timed(checkpointing, names):
    result = measure(names=names, settings=CPU._replace(checkpointing=checkpointing, batch=2))
    assert [row["variant"] for row in result["rows"]] == [TITLES[NAMES.index(name)] for name in names]
    dense = result["rows"][0]
    for row in result["rows"]:
        assert row["loss_error"] < 1e-5
        assert row["gradient_error"] < 1e-4
        assert 0 < row["fastest_s"] <= row["step_s"] <= row["slowest_s"]
        assert row["images_per_s"] == pytest.approx(2 / row["step_s"])
        assert row["speed_up"] == pytest.approx(dense["step_s"] / row["step_s"])
        assert 0 < row["attention_share"] == pytest.approx(row["attention_s"] / row["step_s"])
    assert table_of(result).row_count == 1 + len(names)


def test_variants_that_are_alike_at_a_size_are_timed_once():
    assert Variant().at(256**2) == Variant(levels=2)
    assert Variant().at(512**2) == Variant(levels=3)
    titles = [row["variant"] for row in measure(names=["llsa", "llsa-2", "llsa", "top-k"])["rows"]]
    assert titles == ["LLSA, 1 level", "LLSA, 2 levels", "top-k, 1 level"]


def test_compile_caches_are_off_while_a_variant_is_timed(monkeypatch):
    """PyTorch's caches of compiled code do not ask which kernel of dense attention was wanted."""
    off, learn = [], train.train_step
    monkeypatch.setattr(
        train, "train_step", lambda *given: off.append(torch.compiler.config.force_disable_caches) or learn(*given)
    )
    measure(names=["dense"])
    assert set(off) == {True}
    assert not torch.compiler.config.force_disable_caches


def test_attention_without_one_block_fails_the_check(monkeypatch):
    monkeypatch.setattr(train, "ALL_BLOCKS", train.ALL_BLOCKS - 1)
    dense, *sparse = measure(names=["dense", "top-k", "llsa"])["rows"]
    assert dense["step_s"] > 0
    for row in sparse:
        assert row["failed"].startswith("gradient error ")
        assert row["failed"].endswith(": not timed")
        assert "step_s" not in row


def test_a_step_with_a_nan_loss_is_not_timed(monkeypatch):
    monkeypatch.setattr(train, "train_step", lambda *_: torch.tensor(float("nan")))
    assert measure(names=["llsa"])["rows"][0]["failed"] == "the loss is not finite: not timing a wrong step"


def test_variants_that_need_too_much_time_or_memory_are_skipped_with_a_reason(monkeypatch):
    result = measure(names=["dense", "llsa"], settings=CPU._replace(longest=0))
    for row in result["rows"]:
        assert row["failed"].startswith("skipped: about ")
        assert row["failed"].endswith(" s, measured; more than 0 s")
    assert table_of(result).row_count == 3

    def greedy(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(train, "train_step", greedy)
    assert measure(names=["dense"])["rows"][0]["failed"] == "skipped: out of memory"


def test_a_step_that_is_predicted_to_be_slow_is_skipped(monkeypatch):
    fewer = {"tokens": 100, "step_s": 2.0, "attention_share": 0.75}
    assert Variant("dense").seconds_at(400, fewer) == pytest.approx(1.5 * 16 + 0.5 * 4)
    assert Variant(levels=1).seconds_at(400, fewer) == pytest.approx(1.5 * 16 + 0.5 * 4)
    assert Variant(levels=2).seconds_at(400, fewer) == pytest.approx(8)
    clock = iter(range(1000))
    monkeypatch.setattr(train, "now", lambda device: next(clock))  # every step takes a second
    small, large = measure((32, 16), ["dense"], CPU._replace(longest=2))["rows"]
    assert (small["pixels"], small["step_s"]) == (16, 1)
    assert "predicted from fewer tokens; more than 2 s" in large["failed"]


def test_slow_steps_are_timed_less_often(monkeypatch):
    clock = iter(range(0, 10000, 5))
    monkeypatch.setattr(train, "now", lambda device: next(clock))
    (row,) = measure(names=["dense"], settings=CPU._replace(rounds=9))["rows"]
    assert row["rounds"] == 2


def test_the_command_writes_json(tmp_path):
    options = ["--pixels", "32,16", "--dit", "tiny", "--variants", "dense,llsa", "--rounds", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["train", *options, "--out", str(tmp_path), "--commit", "abc"])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "train-cpu.json").read_text())
    assert written["versions"]["commit"] == "abc"
    assert [row["pixels"] for row in written["rows"]] == [16, 16, 32, 32]
