"""Models on the Hugging Face hub: a repository holds the files of a model's folder.

huggingface_hub keeps what it fetched (`HF_HOME`), and knows who is logged in (`hf auth login`, or `HF_TOKEN`). Its mixin for
models does not fit: it adds a config.json, by which folders of Transformers are known, and writes weights as one file.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from revzoo.errors import CheckpointError, InputError

HUB_PREFIX = "hf-hub:"
TIMM_PREFIX, TRANSFORMERS_PREFIX = "timm:", "hf:"  # of networks that `revzoo convert` makes reversible
# Nothing else of a repository is fetched: what is not a spec, safetensors or a tokenizer is never read.
_REPLACED = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "tokenizer.json")
_OF_RUNS = ("best.safetensors", "best-*-of-*.safetensors", "best.safetensors.index.json")
_FETCHED = ("spec.yaml", *_REPLACED, *_OF_RUNS)
_CARD = "README.md"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_CONFIG = "config.json"
_SAFETENSORS, _PICKLED = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)


def drop_code(config: Any) -> Any:
    """Return a configuration of Transformers without code that it, or one inside it, names: classes, and kernels of the hub.

    Its attention is then the one that Transformers chooses, also where it named `eager`.
    """
    config._attn_implementation, config.auto_map = None, {}
    for inner in vars(config).values():
        if hasattr(inner, "_attn_implementation"):  # a configuration, whatever it is called here
            drop_code(inner)
    return config


def is_foreign(name: str) -> bool:
    """Return whether a name is that of a network of timm or Transformers, or a folder that Transformers has written."""
    of_revzoo, of_transformers = (os.path.isfile(os.path.join(name, file)) for file in ("spec.yaml", _CONFIG))
    return name.startswith((TIMM_PREFIX, TRANSFORMERS_PREFIX)) or (of_transformers and not of_revzoo)


def fetch_if_on_hub(source: str | Path) -> str | Path:
    """Return the local folder of a model named hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION; another source as it is.

    Raises:
        CheckpointError: the model cannot be fetched.
        InputError: the name is not of that form.
    """
    return fetch_folder(source) if isinstance(source, str) and source.startswith(HUB_PREFIX) else source


def fetch_folder(source: str, **where: Any) -> Path:
    """Fetch spec, weights and tokenizer of a repository, and return the folder that holds them.

    Args:
        source: OWNER/NAME or OWNER/NAME@REVISION, with or without hf-hub: before it.
        **where: token, cache_dir and local_files_only, as for `huggingface_hub.snapshot_download`.
    Raises:
        CheckpointError: the repository cannot be fetched, or holds no model of revzoo.
        InputError: the source is not of that form.
    """
    repository, _, tag = source.removeprefix(HUB_PREFIX).partition("@")
    remedy = "Check its name and the connection; a private repository needs `hf auth login`"
    with _explain(repository, "fetched", remedy):
        from huggingface_hub import HfApi  # takes as long to import as everything else that listing models needs

        where |= {"revision": tag or None, "allow_patterns": list(_FETCHED)}
        folder = Path(HfApi(library_name="revzoo").snapshot_download(repository, **where))
    if not (folder / "spec.yaml").is_file():
        raise CheckpointError(
            f"{HUB_PREFIX}{repository} holds no spec.yaml: it is not a model that revzoo wrote. Networks of timm and "
            f"Transformers are converted (revzoo convert {TRANSFORMERS_PREFIX}{repository})."
        )
    return folder


def fetch_transformers(name: str, *, weights: bool) -> Path:
    """Return the folder in the hub's cache with a network of Transformers, named hf:OWNER/NAME or hf:OWNER/NAME@REVISION.

    Args:
        name: of the network.
        weights: whether they are fetched, too: safetensors, or pickled ones where there are no others.
    Raises:
        CheckpointError: it cannot be fetched, and is not in the cache; or it has no config.json.
    """
    repository = name.removeprefix(TRANSFORMERS_PREFIX)
    folder = fetch_files(repository, _CONFIG, "tokenizer.json", *(_SAFETENSORS if weights else ()))
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{name} has no {_CONFIG}: it is no network of Transformers. One of timm is named timm:NAME.")
    if weights and not any(folder.glob(_SAFETENSORS[0])):
        fetch_files(repository, *_PICKLED)
    return folder


def fetch_files(repository: str, *patterns: str) -> Path:
    """Fetch the files of OWNER/NAME or OWNER/NAME@REVISION that match; return the folder in the hub's cache with what it has.

    Raises:
        CheckpointError: the hub cannot be reached, and nothing of the repository is in the cache.
    """
    name, _, tag = repository.partition("@")
    remedy = (
        f"Without a connection, copy https://huggingface.co/{name} into a folder and name that, or bring the cache (HF_HOME)"
    )
    with _explain(name, "fetched", remedy, "https://huggingface.co/"):
        from huggingface_hub import HfApi

        client = HfApi(library_name="revzoo")
        return Path(client.snapshot_download(name, revision=tag or None, allow_patterns=list(patterns)))


def upload_folder(
    folder: Path, repository: str, message: str, *, private: bool | None, token: str | bool | None, revision: str | None
) -> str:
    """Upload a folder that holds a model, as one commit with this message; return the commit's address.

    A model card that the repository has stays as it is. The other arguments are those of `Model.push_to_hub`.

    Raises:
        CheckpointError: the hub refuses, or cannot be reached.
        InputError: `repository` is not OWNER/NAME.
    """
    remedy = "Log in with a token that may write to it (hf auth login), or name another repository"
    with _explain(repository, "written", remedy):
        from huggingface_hub import HfApi

        client = HfApi(token=token, library_name="revzoo")
        client.create_repo(repository, private=private, exist_ok=True)
        has_card = client.file_exists(repository, _CARD, revision=revision)
        commit = client.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            ignore_patterns=[_CARD] if has_card else None,
            delete_patterns=list(_REPLACED),  # or shards of an earlier model would stay next to the new one's
        )
    return str(commit.commit_url)


@contextmanager
def _explain(repository: str, done: str, remedy: str, prefix: str = HUB_PREFIX) -> Iterator[None]:
    """Turn whatever the client raises inside the block into an error that names the repository and the remedy."""
    if prefix == HUB_PREFIX and not _REPOSITORY.fullmatch(repository):
        raise InputError(f"A model is an existing folder, or OWNER/NAME on the hub. Received: {repository!r}.")
    try:
        yield
    except Exception as error:  # the errors of the HTTP library, which depends on the version, are among them
        reason = str(error).strip().partition("\n")[0]
        what = f"{prefix}{repository} cannot be {done} ({type(error).__name__}: {reason})"
        raise CheckpointError(f"{what}. {remedy}.") from error
