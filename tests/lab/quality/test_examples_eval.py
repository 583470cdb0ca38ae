"""Laws of the experiment with blocks of examples: gains are paired, hosts the library's, no gap means no claim."""

import json

import numpy as np
import pytest
import torch
from lab.quality.example_partitions import CONTROLS, PARTITIONS, partition
from lab.quality.example_pools import KINDS, draw
from lab.quality.example_readers import LABELS, Learner, Recipe, Vote, layout, trained_learner, training_batch
from lab.quality.example_tables import has_gap, tables, verdict
from lab.quality.examples import ONE_BLOCK, ONE_TEXT, Cell, answer, hosts, interval, main, partitioned, rows_of, scores
from transformers import LlamaConfig, LlamaForCausalLM

from foveate import SubCP
from foveate.transformers.in_context import ensemble, parallel_windows
from foveate.utils.progress import silent

TINY = Recipe(width=32, layers=1, steps=3, batch=4)
BLOCKS = [[0, 5, 2], [7, 1, 3]]


@pytest.fixture(autouse=True)
def of_its_own():
    """Pools that are kept were drawn as often as the test before wanted."""
    partitioned.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_that_of_its_seed_and_shares_no_example_with_its_questions(kind):
    task, again, other = draw(kind, 60, 1), draw(kind, 60, 1), draw(kind, 60, 2)
    assert torch.equal(task.embeddings, again.embeddings)
    assert not torch.equal(task.embeddings, other.embeddings)
    assert (task.queries @ task.embeddings.T).max() < 0.9999
    assert int(max(task.labels.max(), task.answers.max())) < task.classes <= LABELS


def test_the_skewed_pool_alone_holds_near_copies():
    for kind, share in (("skewed", 0.25), ("balanced", 0.0)):
        similar = (task := draw(kind, 400, 0)).embeddings @ task.embeddings.T
        copied = (similar.fill_diagonal_(0) > 0.99).any(1).float().mean()
        assert share <= copied <= 2 * share
    with pytest.raises(ValueError, match="unknown data 'news': choose one of skewed, balanced, docstrings"):
        draw("news", 10, 0)


@pytest.mark.parametrize("method", PARTITIONS)
@pytest.mark.parametrize("examples", [12, 80])
def test_every_method_fills_all_blocks_with_different_examples(method, examples):
    task = draw("skewed", examples, 3)
    ids = partition(method, task.embeddings, task.labels, 4, 3, 7)
    assert [len(block) for block in ids] == [3] * 4
    assert len({example for block in ids for example in block}) == 12
    assert partition(method, task.embeddings, task.labels, 4, 3, 7) == ids


def test_controls_partition_the_examples_of_global_local():
    task = draw("skewed", 80, 3)
    union = set(SubCP().select(task.embeddings, 12).ids.tolist())
    for method in ("global_local", *CONTROLS):
        ids = partition(method, task.embeddings, task.labels, 4, 3, 7)
        assert {example for block in ids for example in block} == union


def test_a_vote_is_the_softmax_of_cosines_by_label():
    task = draw("skewed", 20, 0)
    said = Vote().by_block(task, BLOCKS)[1, 4].exp()
    near = (task.embeddings[BLOCKS[1]] @ task.queries[4] / 0.15).exp()
    for label in range(task.classes):
        share = sum(n for n, i in zip(near, BLOCKS[1], strict=True) if task.labels[i] == label) / near.sum()
        assert said[label].item() == pytest.approx(0.99 * float(share) + 0.01 / task.classes, rel=1e-4)


def test_hosts_follow_the_library():
    task = draw("skewed", 20, 0)
    (said,) = hosts(Vote(), task, [BLOCKS])
    apart = Vote().by_block(task, BLOCKS)
    for question in (0, 17):
        near = torch.stack([(task.embeddings[block] @ task.queries[question]).max() for block in BLOCKS])
        for mix in ("moe", "poe", "max"):
            want = ensemble(list(apart[:, question]), (near / 0.1).softmax(0), mix)
            assert torch.allclose(said[f"{mix}, weighted"][question], want, atol=1e-6)
    assert torch.allclose(said[ONE_BLOCK], apart[0].exp())
    assert torch.allclose(said[ONE_TEXT], Vote().by_block(task, [BLOCKS[0] + BLOCKS[1]])[0].exp())
    (read,) = hosts(Learner(TINY).eval(), task, [[BLOCKS[0]]])
    for host in ("moe", "poe", "max, weighted", "parallel windows"):
        assert torch.allclose(read[host], read[ONE_TEXT], atol=1e-5)


def test_the_masks_of_windows_are_the_windows_of_the_library():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).double().eval()
    windows = [[[5], [6], [7]], [[8], [9], [10]]]
    mask, positions = layout(6, 2, 2)
    tokens = torch.tensor([[1, 5, 6, 7, 8, 9, 10, 20, 21]])
    with torch.no_grad():
        got = model(tokens, attention_mask=mask, position_ids=positions[None]).logits[0, -2:]
    context = parallel_windows(model, windows, [1])
    for i, question in enumerate((20, 21)):
        assert torch.allclose(got[i], context.logits(torch.tensor([[question]]))[0, -1])


def test_scores_match_a_count_by_hand():
    task = draw("balanced", 20, 0)._replace(answers=torch.tensor([0, 0, 1, 1]), classes=3)
    said = torch.tensor([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.3, 0.7, 0.0]])
    accuracy, error, worst = scores(said, task)
    assert (accuracy, worst) == (0.75, 0.5)
    assert error == pytest.approx((2 * 0.1 + 0.6 + 0.3) / 4)


def test_labels_of_a_training_batch_follow_only_from_its_examples():
    first, again = training_batch(TINY, 3), training_batch(TINY, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[3], training_batch(TINY, 4)[3])
    answers = torch.cat([training_batch(TINY, step)[3].flatten() for step in range(200)])
    assert (answers.bincount(minlength=LABELS) / len(answers) - 1 / LABELS).abs().max() < 0.02


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.training.loop.CHECKPOINT_STEPS", 2)

    class Stop(Exception):
        pass

    def track(name, length):
        steps = iter(range(length))

        def advance():
            if next(steps) == 2:
                raise Stop

        return advance

    whole = trained_learner(TINY, tmp_path / "whole", "cpu", silent)
    with pytest.raises(Stop):
        trained_learner(TINY, tmp_path / "broken", "cpu", track)
    assert (tmp_path / "broken" / "000000002").exists()
    resumed = trained_learner(TINY, tmp_path / "broken", "cpu", silent)
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight)


def test_intervals_are_paired_and_a_claim_needs_one_that_excludes_0():
    pools = np.random.default_rng(0).normal(size=20)
    mean, low, high = interval((pools + 0.1) - pools)
    assert (mean, low, high) == (0.1, 0.1, 0.1)
    mean, low, high = interval(pools)
    assert low < mean < high
    assert [verdict(gain) for gain in ([0.2, 0.1, 0.3], [0.1, -0.1, 0.3], [-0.2, -0.3, -0.1])] == [1, 0, -1]


def test_rows_are_means_over_pools_and_learners_and_gains_are_paired(monkeypatch):
    monkeypatch.setattr("lab.quality.examples.DRAWS", 1)
    cell = Cell("skewed", 30, 2, 3)
    pools = [[answer(reader, cell, pool) for pool in range(3)] for reader in (Vote(), Learner(TINY).eval())]
    pools = [
        [{method: {h: of[h] for h in (ONE_TEXT, ONE_BLOCK)} for method, of in pool.items()} for pool in one]
        for one in pools
    ]
    rows = rows_of(cell, pools)
    row = next(row for row in rows if row["method"] == "local_diverse")
    by_hand = np.array(
        [[pool["local_diverse"][ONE_TEXT][0] - pool["random"][ONE_TEXT][0] for pool in one] for one in pools]
    )
    assert row["over random"][0] == pytest.approx(by_hand.mean(), abs=1e-4)
    assert row["over random, each learner"] == pytest.approx(by_hand.mean(1).tolist(), abs=1e-4)
    assert row["accuracy"] == pytest.approx(
        np.mean([p["local_diverse"][ONE_TEXT][0] for one in pools for p in one]), abs=1e-4
    )
    assert next(row for row in rows if row["method"] == "random")["over random"] == [0, 0, 0]


def test_settings_without_a_gap_are_marked():
    cell = Cell("skewed", 600, 8, 8)
    rows = rows_of(cell, [[answer(Vote(), cell, 0)]])
    none = [{**row, "gap": [0.1, -0.1, 0.2]} for row in rows]
    assert not any(map(has_gap, none))
    assert "no gap" in tables(none)
    assert "no gap" not in tables(rows)


def test_the_command_writes_results_and_reuses_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lab.quality.examples.KINDS", ("skewed",))
    monkeypatch.setattr("lab.quality.examples.DRAWS", 1)
    options = {"pools": 2, "seeds": 1, "cells": "2x3", "width": 32, "layers": 1, "steps": 2, "batch": 2, "rate": 1e-3}
    main("learner", **options, out=tmp_path / "out", commit="abc")
    path = next((tmp_path / "lab" / "results").glob("examples-learner-*.json"))
    written = json.loads(path.read_text())
    assert written["about"]["versions"]["commit"] == "abc"
    assert {row[written["columns"].index("examples")] for row in written["rows"]} == {600, 6}
    monkeypatch.setattr("lab.quality.examples.answer", None)  # all is there
    main("learner", **options, out=tmp_path / "out", commit="abc")
    assert json.loads(path.read_text()) == written
    with pytest.raises(ValueError, match="unknown reader 'me': choose vote or learner"):
        main("me", **options)
