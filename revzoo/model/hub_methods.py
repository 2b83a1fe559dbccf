"""Save a model as a folder, and share it on the Hugging Face hub: the methods of that part of `revzoo.Model`."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch

from revzoo import hub
from revzoo.checkpoint.folder import save_folder
from revzoo.checkpoint.writing import call_once
from revzoo.file import write_text
from revzoo.model.card import CARD, write_card
from revzoo.model.network import Network


class HubMethods(Network):
    """What a model can do with folders and the hub.

    A folder holds spec.yaml, safetensors, the tokenizer of a model of texts, and a model card, README.md.
    """

    _create: ClassVar[Callable[..., Any]]  # `revzoo.create`, whose file sets it: that one imports this one

    def save_pretrained(self, folder: str | Path) -> None:
        """Write spec, weights and a model card into a folder, which `revzoo.create` and every command then take.

        Schedule, look-ahead and `exact` are settings of a run, and are not saved. Weights of more than 5 GB are in several
        files with an index. A card that is there already stays as it is.

        Args:
            folder: it is made if there is none; a model that was saved there before is replaced.
        Raises:
            InputError: the model has no values, or the folder cannot be made or is that of a run.
        """
        self._save(Path(folder), Path(folder).name or "FOLDER")

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        num_outputs: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Create a model from a folder or from the hub, in eval mode. `revzoo.create` takes more arguments.

        Args:
            source: a folder that `save_pretrained`, `revzoo convert` or `revzoo train` wrote, or OWNER/NAME on the hub.
            revision: branch, tag or commit on the hub; None: the main branch.
            token: of the hub; None: that of the user who is logged in.
            cache_dir: where fetched files are kept; None: huggingface_hub's cache.
            local_files_only: take what was fetched before.
            num_outputs: number of classes, as for `create`.
            device: as for `create`.
            dtype: as for `create`.
        Raises:
            InputError: `source` is neither a folder nor OWNER/NAME, or another argument has a value that is not allowed.
            CheckpointError: the hub does not have it, or the weights are missing or damaged.
            SpecError: the spec has problems.
        """
        folder = Path(source)
        if not folder.is_dir():
            where = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
            folder = hub.fetch_folder(f"{source}@{revision}" if revision else str(source), **where)
        return cast(Self, cls._create(folder, num_outputs=num_outputs, device=device, dtype=dtype).eval())

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes, as one commit; return the commit's address.

        A model card that the repository has stays as it is.

        Args:
            repository: OWNER/NAME; it is made if there is none.
            private: whether a new repository is private; None: as the owner has set it.
            token: of the hub; None: that of the user who is logged in.
            revision: branch; None: the main branch.
            commit_message: first line of the commit; None: "Upload NAME".
        Raises:
            InputError: `repository` is not OWNER/NAME, or the model has no values.
            CheckpointError: the hub refuses, or cannot be reached.
        """
        message = commit_message or f"Upload {self.spec.name}"
        with tempfile.TemporaryDirectory() as folder:
            self._save(Path(folder), f"{hub.HUB_PREFIX}{repository}")
            upload = partial(hub.upload_folder, private=private, token=token, revision=revision)
            return call_once(lambda: upload(Path(folder), repository, message), self.parameters())

    def _save(self, folder: Path, source: str) -> None:
        """Write the folder; its card says that the model is made from `source`."""
        save_folder(self, folder)

        def write() -> None:
            if not (folder / CARD).exists():
                write_text(folder / CARD, write_card(self.spec, sum(p.numel() for p in self.parameters()), source))

        call_once(write, self.parameters())
