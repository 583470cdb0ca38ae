"""`foveate rag index`, `add`, `remove` and `info`, and the opening of an index for other commands."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.apps.cli.common import LanguageModel, open_reader, print_table
from foveate.apps.console import Device, Dtype, clear_errors, console, join_processes, progress

__all__ = [
    "Chat", "Chunk", "EightBit", "Force", "Index", "MaxDisk", "MaxMemory", "Place", "Prefix", "Source",
    "add", "index", "info", "open_indexes", "print_refused", "remove",
]  # fmt: skip

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Source = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="Folder of documents (text, code, HTML, CSV, JSON, PDF, Word; pictures for vision-language models), with "
        "its subfolders, or an index: its folder or URL.",
    ),
]
Place = Annotated[str, typer.Argument(metavar="INDEX", help="Folder or URL of the index.")]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Largest number of tokens in a passage. Documents are split after paragraphs or sentences where "
        "possible. 0 keeps them whole. [dim]default: 512, or a quarter of the model's context if that is less[/]",
    ),
]
Prefix = Annotated[
    str, typer.Option(help="Text before the passages, after the start-of-text token or the chat's opening.")
]
Chat = Annotated[bool | None, typer.Option(help="Use the tokenizer's chat template. [dim]default: if it has one[/]")]
Index = Annotated[
    str,
    typer.Option(
        help="Folder or URL (s3://bucket/folder) of the index. [dim]default: FOLDER/.foveate/ and the model's name[/]"
    ),
]
EightBit = Annotated[
    bool,
    typer.Option("--eight-bit", help="Store keys and values as 8-bit integers: half the size, errors of about 0.5 %."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Encode an index anew that was made with another model, dtype or prefix.")
]
MaxDisk = Annotated[
    str,
    typer.Option(
        help="Largest size of the index, such as 20GB. The least recently used passages are removed, and "
        "encoded again when they are needed. [dim]default: no limit[/]"
    ),
]
MaxMemory = Annotated[
    str, typer.Option(help="Memory for the passages of earlier questions, such as 4GB, besides the last question's.")
]


@clear_errors
def index(
    folder: Annotated[Path, typer.Argument(help="Folder of documents, including its subfolders.")],
    model: LanguageModel = "",
    index: Index = "",
    chunk: Chunk = None,
    eight_bit: EightBit = False,
    max_disk: MaxDisk = "",
    prefix: Prefix = "",
    chat: Chat = None,
    force: Force = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Encode a folder of documents, so that questions about it are answered without delay.

    foveate rag index notes --model Qwen/Qwen3-8B --max-disk 20GB

    accelerate launch -m foveate rag index notes --model Qwen/Qwen3-8B --index s3://bucket/notes

    The second command divides the work over all GPUs. Commands on several hosts may share an index and divide its work
    too. An interrupted command resumes, and only new or changed documents are encoded.
    """
    (chunks,), *_ = open_indexes(
        [str(folder)], model, index, chunk, eight_bit, max_disk, "0", prefix, chat, device, dtype, force
    )
    _check_saved(chunks)


@clear_errors
def add(
    place: Place,
    documents: Annotated[list[Path], typer.Argument(help="Documents, or folders of documents.")],
    model: LanguageModel = "",
    chunk: Chunk = None,
    eight_bit: EightBit = False,
    max_disk: MaxDisk = "",
    prefix: Prefix = "",
    chat: Chat = None,
    force: Force = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Add documents to an index that belongs to no folder, and encode them.

    foveate rag add s3://bucket/notes lighthouses/keepers.txt --model Qwen/Qwen3-8B

    A document is named by its path as given here, and replaces one of the same name. `foveate rag index FOLDER`
    removes documents that are not in FOLDER from its index: put the document into FOLDER instead.
    """
    from foveate.transformers.index import ChunkIndex
    from foveate.transformers.model import reads_images
    from foveate.transformers.readers import SUFFIXES, read_documents
    from foveate.transformers.stored_documents import date_of

    if any(path.suffix.lower() in {*SUFFIXES} - {".json"} for path in Path(place).rglob("*")):
        raise ValueError(f"{place} holds documents: put the files there, or name another folder for an index")
    limit, skipped, ignored, texts = bytes_of(max_disk, inf), list[str](), Counter[str](), dict[str, Any]()
    for path in documents:
        read = read_documents(path, skipped, ignored, bool(model) and reads_images(model))
        texts |= read if path.is_file() else {f"{path.as_posix()}/{name}": text for name, text in read.items()}
    date = date_of(place)
    encoder, _, _ = _open_encoder(model, prefix, chat, device, dtype, date)
    with progress() as track:
        chunks = ChunkIndex(place, encoder, max_disk=limit, date=date, force=force)
        chunks = chunks.add(texts, chunk, eight_bit, track)
    _build(chunks, skipped, ignored)
    _check_saved(chunks)


@clear_errors
def remove(
    place: Place, documents: Annotated[list[str], typer.Argument(help="Names of documents, as `info` prints them.")]
) -> None:
    """Remove documents and their encoded passages from an index."""
    from foveate.transformers.stored_documents import remove_documents

    remove_documents(place, documents)
    console.print(f"removed {len(documents)} documents from {place}")


@clear_errors
def info(place: Place) -> None:
    """Print the model and the documents of an index, and how many of their passages are encoded."""
    from foveate.transformers.folder import Folder
    from foveate.transformers.stored_documents import description, read_index

    damaged: list[str] = []
    documents, files = read_index(place, damaged), Folder(place).files()
    if not documents:
        raise ValueError("; ".join(damaged) or f"{place} is no index: the index of a folder is in {place}/.foveate/")
    rows = {
        document.name: f"{sum(file in files for file in document.files)} of {len(document.files)}"
        for document in documents
    }
    used = {file for document in documents for file in document.files} & files.keys()
    size = sum(files[file] for file in used) / 2**20
    for model in {description(document.made): 1 for document in documents}:
        print(f"encoded by {model}")
    print_table(rows, "document", "encoded passages", title=f"{len(rows)} documents, {size:.1f} MiB")
    _print_skipped(damaged)


def open_indexes(
    folders: Sequence[str],
    model: str,
    index: str,
    chunk: int | None,
    eight_bit: bool,
    max_disk: str,
    max_memory: str,
    prefix: str,
    chat: bool | None,
    device: str,
    dtype: str,
    force: bool = False,
    divided: bool = False,
) -> tuple[list[Any], Any, str, str]:
    """Open the index of each folder; returns the indexes, their encoder, and the texts before and after the passages.

    A folder of documents is encoded, divided among processes that were launched together; with `divided`, they then
    divide each context. An existing index is opened unchanged. The other arguments are the options of the commands.
    """
    from foveate.transformers.model import reads_images
    from foveate.transformers.readers import read_documents
    from foveate.transformers.stored_documents import date_of, first_document, index_folder

    options: dict[str, Any] = {"max_disk": bytes_of(max_disk, inf), "max_memory": bytes_of(max_memory, 0)}
    sources: list[tuple[str, dict[str, Any], list[str], Counter[str]]] = []
    for folder in folders:  # before the model is loaded
        if Path(folder).is_file():
            raise ValueError(f"{folder} is a file: name its folder")
        skipped, ignored = list[str](), Counter[str]()
        pictures = bool(model) and reads_images(model)
        documents = {} if first_document(folder) else read_documents(Path(folder), skipped, ignored, pictures)
        where = str(index or index_folder(Path(folder), model)) if documents else folder
        sources.append((where, documents, skipped, ignored))
    options |= {"date": date_of(*(where for where, *_ in sources)), "force": force}
    encoder, before, after = _open_encoder(model, prefix, chat, device, dtype, options["date"], divided)
    from foveate.transformers.index import ChunkIndex, index_documents

    indexes: list[Any] = []
    for where, documents, skipped, ignored in sources:
        if documents:
            with progress() as track:
                indexes.append(index_documents(where, encoder, documents, chunk, eight_bit, **options, track=track))
            _build(indexes[-1], skipped, ignored)
        else:
            indexes.append(ChunkIndex(where, encoder, **options))
            _print_skipped(indexes[-1].skipped)
    return indexes, encoder, before, after


def _open_encoder(
    model: str, prefix: str, chat: bool | None, device: str, dtype: str, date: str, divided: bool = False
) -> tuple[Any, str, str]:
    """An encoder on this process's device, and the texts before and after the passages."""
    import torch.distributed as dist

    from foveate.transformers import ChunkEncoder
    from foveate.transformers.model import chat_frame, check_config, load_processor, reads_images

    if "LOCAL_RANK" in os.environ:
        state, device = join_processes(device)
        divided = divided and state.num_processes > 1
    language_model, tokenizer = open_reader(model, device, dtype, check_config)
    before, after = chat_frame(tokenizer, chat, date)
    group = dist.group.WORLD if divided and "LOCAL_RANK" in os.environ else None
    reads = load_processor(model) if model and group is None and reads_images(model) else tokenizer
    return ChunkEncoder(language_model, reads, before + prefix, group), before + prefix, after


def _build(chunks: Any, skipped: Sequence[str], ignored: Counter[str]) -> None:
    """Encode missing passages, together with the other launched processes, and print a summary."""
    from foveate.transformers.readers import describe_ignored

    if ignored:
        console.print(describe_ignored(ignored), soft_wrap=True)
    _print_skipped([*skipped, *chunks.skipped])
    if not chunks.passages:
        raise ValueError("there are no documents left: see the remedies above")
    with progress() as track:
        built = chunks.build(track)
    encoded, done = built.encoded, built.encoded + built.found
    if "LOCAL_RANK" in os.environ:
        from accelerate.utils import gather_object

        encoded = sum(gather_object([encoded]))  # waits for all
    why = "not written" if chunks.unsaved else "left out for --max-disk"
    left = f", {built.left} {why}" if built.left else ""
    console.print(
        f"{len(chunks.passages)} passages, {sum(map(len, chunks.ids))} tokens: {encoded} encoded, "
        f"{max(0, done - encoded)} found, {built.removed} removed{left}; "
        f"{chunks.nbytes / 2**20:.1f} MiB in {chunks.place}"
    )


def _check_saved(chunks: Any) -> None:
    if chunks.unsaved:
        raise ValueError(f"the index is incomplete: {chunks.unsaved[0]}; make room and run the command again")


def _print_skipped(reasons: Sequence[str]) -> None:
    if reasons:
        console.print(
            "\n".join([f"skipped {len(reasons)} documents:", *(f"  {reason}" for reason in reasons)]), soft_wrap=True
        )


def print_refused(chunks: Any) -> None:
    """Print the reasons for unusable chunks of the index, once."""
    for reason in chunks.refused:
        console.print(f"encoded again: {reason}", soft_wrap=True)
    chunks.refused.clear()


def bytes_of(text: str, usual: float) -> float:
    """Number of bytes for a text such as "20GB" or "512MiB"; `usual` if it is empty.

    Raises:
        ValueError: If the text is not a size.
    """
    if not text:
        return usual
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip().lower())
    if not found:
        raise ValueError(f"cannot read the size {text!r}: write a number and a unit, such as 500MB or 20GB")
    return float(found[1]) * UNITS[found[2] or ""]
