"""Laws of drawing the atlas."""

import pytest
from lab.training.atlas import draw_atlas


def test_a_missing_or_wrong_font_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"no Noto Color Emoji in .*nowhere.ttf: install it .* --font"):
        draw_atlas(tmp_path / "nowhere.ttf")
    (tmp_path / "wrong.ttf").write_bytes(b"no font")
    with pytest.raises(ValueError, match=r"wrong.ttf does not hold bitmaps"):
        draw_atlas(tmp_path / "wrong.ttf")
