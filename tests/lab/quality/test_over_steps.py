"""Laws of the study of sparsity and resolution over steps: what it chooses, and that it resumes."""

import json

from lab.quality import over_steps
from lab.quality.over_steps import Setting, candidates, choose

from foveate import HilbertA, ToMA
from foveate.methods import ProgressiveResolution


def test_the_fastest_setting_of_each_kind_and_one_as_long_as_merging_are_chosen():
    kinds = {
        "slow": Setting("one", HilbertA(tiles=4, start_percent=0.8)),
        "fast": Setting("one", HilbertA(tiles=4, start_percent=0.6)),
        "far": Setting("schedule", HilbertA(tiles=((0.0, "dense"), (0.6, 16)))),
        "merged": Setting("one", ToMA(keep=0.5)),
        "short": Setting("resolution", None, ProgressiveResolution(until=0.4)),
        "long": Setting("resolution", None, ProgressiveResolution(until=0.1)),
    }
    told = {"slow": (40, 1.0, 9), "fast": (31, 0.9, 7), "far": (30.2, 1.0, 5), "merged": (20, 1.0, 4),
            "short": (15, 0.8, 3), "long": (25, 1.0, 6)}  # fmt: skip
    tried = {
        kinds[name].title: dict(zip(("psnr", "objects", "seconds"), one, strict=True)) for name, one in told.items()
    }
    tried["dense"] = {"psnr": None, "objects": 1.0, "seconds": 10}
    assert choose([*kinds.values()], tried) == {
        "one, 30 dB": kinds["fast"],
        "one, equal objects": kinds["merged"],
        "schedule, equal objects": kinds["far"],
        "resolution, equal objects": kinds["long"],
        "ToMA keep=0.5": kinds["merged"],
        "resolution, as long as ToMA keep=0.5": kinds["short"],
    }


def test_titles_tell_the_settings_apart():
    assert len({one.title for one in candidates()}) == len(candidates())


def test_the_study_resumes_and_writes_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(over_steps, "STEPS", 2)
    drawn, generate = [], over_steps.generate

    def counted(pipe, setting, batches):
        drawn.append(setting.title)
        return generate(pipe, setting, batches)

    monkeypatch.setattr(over_steps, "generate", counted)
    asked = {
        "size": 64,
        "search": 1,
        "prompts": 1,
        "batch": 1,
        "only": ["ToMA keep=0.75", "/ 2 until 0.5"],
        "device": "cpu",
    }
    over_steps.main(pictures=str(tmp_path / "pictures"), **asked)
    result = json.loads((tmp_path / "lab/results/over-steps-cpu-64px.json").read_text())
    cases = [row["case"] for row in result["rows"]]
    assert {"dense", "ToMA keep=0.75", "resolution, as long as ToMA keep=0.75"} <= set(cases)
    assert {"resolution / 2 until 0.5", "ToMA keep=0.75"} <= {row["settings"] for row in result["searched"]}
    assert all(row["seconds"] > 0 and row["gain"] > 0 for row in result["rows"])
    before = len(drawn)
    over_steps.main(pictures=str(tmp_path / "pictures"), **asked)
    assert len(drawn) == before
