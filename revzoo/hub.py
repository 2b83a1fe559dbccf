"""Models on the Hugging Face hub: a repository holds the files of a model's folder.

huggingface_hub keeps what it fetched (`HF_HOME`), and knows who is logged in (`hf auth login`, or `HF_TOKEN`).
"""

import os
import re
from pathlib import Path
from typing import Any

from revzoo.errors import CheckpointError, InputError

HUB_PREFIX = "hf-hub:"
# Nothing else of a repository is fetched: what is not a spec, safetensors or a tokenizer is never read.
_REPLACED = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "tokenizer.json")
_OF_RUNS = ("best.safetensors", "best-*-of-*.safetensors", "best.safetensors.index.json")
_FETCHED = ("spec.yaml", *_REPLACED, *_OF_RUNS)
_CARD = "README.md"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def find_source(source: str | Path) -> str | Path:
    """Return the local folder of a model named hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION; another source as it is.

    Raises:
        CheckpointError: the model cannot be fetched.
        InputError: the name is not of that form, or the source is neither text nor a path.
    """
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"A model is a name (revzoo.list_models()), a spec file or a folder. Received: {source!r}. "
            "Use 'rev_vit_s', for example."
        )
    if not isinstance(source, str) or not source.startswith(HUB_PREFIX):
        return source
    repository, revision = split_name(source)
    return fetch_folder(repository, revision=revision)


def split_name(source: str) -> tuple[str, str | None]:
    """Return OWNER/NAME and the revision, if there is one, of OWNER/NAME@REVISION with or without the prefix."""
    repository, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
    return repository, revision or None


def fetch_folder(
    repository: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Fetch spec, weights and tokenizer of a repository, and return the folder that holds them.

    Args:
        repository: OWNER/NAME.
        revision: branch, tag or commit; None: the main branch.
        token: of the hub; None: that of the user who is logged in.
        cache_dir: where fetched files are kept; None: huggingface_hub's cache.
        local_files_only: take what was fetched before.
    Raises:
        CheckpointError: the repository cannot be fetched, or holds no model of revzoo.
        InputError: `repository` is not OWNER/NAME.
    """
    client = _make_client(repository, token)
    try:
        folder = Path(
            client.snapshot_download(
                repository,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                allow_patterns=list(_FETCHED),
            )
        )
    except Exception as error:  # the errors of the HTTP library, which depends on the version, are among them
        raise CheckpointError(
            f"{HUB_PREFIX}{repository} cannot be fetched ({_shorten(error)}). Check its name and the connection; a private "
            "repository needs `hf auth login`, and files that were fetched before local_files_only=True."
        ) from error
    if not (folder / "spec.yaml").is_file():
        raise CheckpointError(
            f"{HUB_PREFIX}{repository} holds no spec.yaml: it is not a model that revzoo wrote. Networks of timm and "
            "Transformers are converted (revzoo.convert)."
        )
    return folder


def upload_folder(
    folder: Path,
    repository: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str,
) -> str:
    """Upload a folder that holds a model, as one commit; return the commit's address.

    A model card that the repository has stays as it is.

    Args:
        folder: all of its files are uploaded.
        repository: OWNER/NAME; it is made if there is none.
        private: whether a new repository is private; None: as the owner has set it.
        token: of the hub; None: that of the user who is logged in.
        revision: branch; None: the main branch.
        commit_message: first line of the commit.
    Raises:
        CheckpointError: the hub refuses, or cannot be reached.
        InputError: `repository` is not OWNER/NAME.
    """
    client = _make_client(repository, token)
    try:
        client.create_repo(repository, private=private, exist_ok=True)
        has_card = client.file_exists(repository, _CARD, revision=revision)
        commit = client.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            ignore_patterns=[_CARD] if has_card else None,
            delete_patterns=list(_REPLACED),  # what an earlier model had, too, would be left beside the new one
        )
    except Exception as error:  # as above
        raise CheckpointError(
            f"{HUB_PREFIX}{repository} cannot be written ({_shorten(error)}). Log in with a token that may write to it "
            "(hf auth login), or name another repository."
        ) from error
    return str(commit.commit_url)


def _make_client(repository: str, token: str | bool | None) -> Any:
    """Return the hub's client, or raise InputError unless the repository is OWNER/NAME."""
    if not _REPOSITORY.fullmatch(repository):
        raise InputError(f"A repository of the hub is OWNER/NAME. Received: {repository!r}. Use for example 'me/rev_vit'.")
    from huggingface_hub import HfApi  # takes as long to import as everything else that listing models needs

    return HfApi(token=token, library_name="revzoo")


def _shorten(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
