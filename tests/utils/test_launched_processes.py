"""Laws of several processes."""

from unittest.mock import Mock

import accelerate
import pytest

from foveate.utils import processes


@pytest.mark.parametrize(("first", "seen"), [(True, [True, True]), (True, [True, False]), (False, [True, False])])
def test_a_folder_that_nodes_do_not_share_is_refused(monkeypatch, tmp_path, first, seen):
    monkeypatch.setattr(
        processes, "join", lambda: Mock(accelerate.PartialState, num_processes=2, is_main_process=first)
    )
    monkeypatch.setattr(accelerate.utils, "gather_object", lambda _: seen)
    if all(seen):
        processes.check_shared(tmp_path / "out")
    else:
        with pytest.raises(ValueError, match=r"not all nodes see .*out of the first one: name a folder they share"):
            processes.check_shared(tmp_path / "out")
    assert not list(tmp_path.glob("out/*"))
