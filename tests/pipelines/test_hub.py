"""Laws of files of the hub: what cannot be had is said, with what to do."""

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from foveate.pipelines import hub
from foveate.pipelines.lora import find_lora
from foveate.pipelines.request import load_pipeline

RESPONSE = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError("401", response=RESPONSE), "gated: accept its licence at https://huggingface.co/some/model"),
        (RepositoryNotFoundError("401", response=RESPONSE), "no repository of that name, or it is private"),
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (EntryNotFoundError("404"), "the repository has no "),
    ],
)
def test_what_the_hub_does_not_give_is_said_with_what_to_do(monkeypatch, error, message):
    def refuse(*_):
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    for ask, name in ((load_pipeline, "cannot load some/model"), (find_lora, "cannot find the LoRA some/model")):
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            ask("some/model")


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "~/nowhere", "a/b/c", "missing.safetensors"])
def test_the_hub_is_not_asked_for_what_no_repository_is_called(monkeypatch, name):
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_: pytest.fail("asked"))
    for ask in (load_pipeline, find_lora):
        with pytest.raises(ValueError, match="there is no such file or folder"):
            ask(name)
