"""Files from the Hugging Face hub, with errors that say what to do."""

import re
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

__all__ = ["fetch"]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def fetch(repository: str, file: str) -> Path:
    """A file of a repository, from the cache if it is there.

    Raises:
        ValueError: If it cannot be downloaded.
    """
    if not HUB_ID.fullmatch(repository):
        raise ValueError("there is no such file or folder, and it is no hub id such as black-forest-labs/FLUX.1-dev")
    try:
        return Path(hf_hub_download(repository, file))
    except GatedRepoError as error:
        page = f"https://huggingface.co/{repository}"
        raise ValueError(f"it is gated: accept its licence at {page}, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ValueError("no repository of that name, or it is private: run `hf auth login` first") from error
    except LocalEntryNotFoundError as error:
        raise ValueError("the hub cannot be reached and the file is not in the cache: name a folder") from error
    except EntryNotFoundError as error:
        raise ValueError(f"the repository has no {file}") from error
