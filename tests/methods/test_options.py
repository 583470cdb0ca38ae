"""Laws of options: the error of a wrong type or name is one clear line; layers may be text, a number or a list."""

import copy
import pickle

import pytest

from foveate import LLSA, HilbertA, InfoFlowKV, SubCP, ToMA
from foveate.methods import METHODS, method_from_text

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (ToMA, {"keep": "0.5"}, "keep must be a number, not '0.5'"),
        (ToMA, {"tile": 4}, r"tile must be numbers in parentheses, such as \(4, 4\), not 4"),
        (ToMA, {"merge_mlp": "yes"}, "merge_mlp must be true or false or None, not 'yes'"),
        (ToMA, {"weights": "all"}, "weights must be one of soft, hard, not 'all'"),
        (HilbertA, {"tiles": True}, "tiles must be a whole number or 'auto', not True"),
        (HilbertA, {"tiles": "many"}, "tiles must be a whole number or 'auto', not 'many'"),
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
