"""Laws of options: the error of a wrong type or name is one clear line; layers may be text, a number or a list."""

import copy
import pickle

import pytest

from foveate import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA
from foveate.methods import METHODS, method_from_text, options_in

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (ToMA, {"keep": "0.5"}, "keep must be a number or a schedule, .*, not '0.5'"),
        (ToMA, {"tile": 4}, r"tile must be numbers in parentheses, such as \(4, 4\), not 4"),
        (ToMA, {"merge_mlp": "yes"}, "merge_mlp must be true or false or None, not 'yes'"),
        (ToMA, {"weights": "all"}, "weights must be one of soft, hard, not 'all'"),
        (HilbertA, {"tiles": True}, "tiles must be a whole number or 'auto' or a schedule, .*, not True"),
        (HilbertA, {"tiles": "many"}, "tiles must be a whole number or 'auto' or a schedule, .*, not 'many'"),
        (HilbertA, {"centre": "0.5"}, "centre must be a number, not '0.5'"),
        (HilbertA, {"align": "wide"}, "align must be a whole number or None, not 'wide'"),
        (HilbertA, {"dense_layers": ["a"]}, "dense_layers must be text or a whole number or numbers in parentheses"),
        (HilbertA, {"dense_layers": "first"}, 'dense_layers takes layer numbers and ranges such as "0-1, 56"'),
        (HilbertA, {"min_tokens": 1.5}, "min_tokens must be a whole number, not 1.5"),
        (
            HilbertA,
            {"center": 0},
            r"HilbertA has no option 'center' \(did you mean centre\?\): choose from dense_layers",
        ),
        (LLSA, {"topk": 4}, r"LLSA has no option 'topk' \(did you mean top_k\?\)"),
        (InfoFlowKV, {"recompute": "half"}, "recompute must be a number, not 'half'"),
        (SubCP, {"blocks": "8"}, "blocks must be a whole number, not '8'"),
    ],
)
def test_the_error_of_a_wrong_option_is_one_clear_line(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_options_as_text_are_checked_in_the_same_way():
    for options, message in (
        ({"align": "wide"}, "align must be a whole number or None, not 'wide'"),
        ({"center": "0"}, r"no option 'center' \(did you mean centre\?\)"),
    ):
        with pytest.raises(ValueError, match=message):
            method_from_text("hilberta", options)


@pytest.mark.parametrize("layers", [[0, 7], (0, 7), "0, 7", "0,7"])
def test_layers_may_be_a_list(layers):
    method = HilbertA(dense_layers=layers)
    assert method.dense_layer_set() == {0, 7}
    assert hash(method)


def test_a_layer_may_be_a_number():
    assert HilbertA(dense_layers=[0]) == HilbertA(dense_layers=0) == HilbertA(dense_layers="0")
    assert method_from_text("hilberta", {"dense_layers": "0"}) == HilbertA(dense_layers="0")
    assert method_from_text("hilberta", {"dense_layers": "0-1, 5"}).dense_layer_set() == {0, 1, 5}


@pytest.mark.parametrize("name", METHODS)
def test_methods_can_be_copied_and_sent_to_other_processes(name):
    method = METHODS[name](dense_layers="1")
    assert copy.deepcopy(method) == pickle.loads(pickle.dumps(method)) == method


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (((0.2, 4), (0.5, 16)), r'the schedule of tiles begins at 0.2: put \(0.0, "dense"\) first'),
        (((0.0, 4), (0.5, 16), (0.2, 2)), r"must grow and stay below 1, not \[0.0, 0.5, 0.2\]"),
        (((0.0, 4), (0.0, 16)), "must grow and stay below 1"),
        (((0.0, 4), (1.0, 16)), r"must grow and stay below 1, not \[0.0, 1.0\]"),
        (((0.0, 4), (float("nan"), 16)), "must grow and stay below 1"),
        (((0.0, "dense"),), "is dense in every step: leave the method out"),
        (((0.0, "dens"), (0.5, 4)), "tiles must be a whole number or 'auto' or a schedule, .*, not 'dens'"),
        (((0.0, "dense"), (0.5, 0)), "a count of 1 or more, not 0"),
        (((0.0, ((0.0, 4), (0.5, 8))), (0.5, 4)), "has pairs of a fraction of the run and a value"),
        ((0.0, 4), r'a value, \(\(0.0, "dense"\), \(0.2, value\)\), not \(0.0, 4\)'),
        ((("dense", 0.0),), "has pairs of a fraction"),
        ((), "has pairs of a fraction"),
    ],
)  # fmt: skip
def test_schedules_that_are_none_are_refused_with_the_remedy(schedule, message):
    with pytest.raises(ValueError, match=message):
        HilbertA(tiles=schedule)


def test_every_setting_of_a_schedule_is_checked():
    for cls, options in (
        (ToMA, {"keep": ((0.0, 0.5), (0.5, 1.5))}),
        (LLSA, {"top_k": ((0.0, 8), (0.5, 0))}),
        (METHODS["tomesd"], {"keep": ((0.0, 0.5), (0.5, 0.1))}),
    ):
        with pytest.raises(ValueError, match=r"not 1.5|top_k.*0|keep=0.1"):
            cls(**options)


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_a_schedule_may_be_text_without_the_quotes_that_shells_take_off(quote):
    text = f"tiles=((0, {quote}dense{quote}), (0.2,{quote}auto{quote}),(0.5,16)), centre=0,curve=moore"
    method = method_from_text("hilberta", options_in(text))
    assert method == HilbertA(tiles=((0.0, "dense"), (0.2, "auto"), (0.5, 16)), centre=0, curve="moore")
    with pytest.raises(ValueError, match=r"tiles must be a whole number or 'auto' or .*, not '0:dense'"):
        method_from_text("hilberta", {"tiles": "0:dense"})


def test_options_in_text_are_cut_at_commas_outside_of_parentheses():
    assert options_in("keep=0.5, tile=(8,8),skip=1") == {"keep": "0.5", "tile": "(8,8)", "skip": "1"}
    assert options_in("") == {}
    with pytest.raises(ValueError, match="option keep has no value"):
        options_in("keep,tile=(8,8)")
