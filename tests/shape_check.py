"""The checker that `conftest.py` puts around all of foveate: beartype, with an int good for a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
