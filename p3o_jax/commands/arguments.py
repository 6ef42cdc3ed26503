"""Arguments that several verbs take, written once: `class Arguments(SamplingArguments, ModelArguments)`.

The fields of the last base come first, on the command line too. An option of several values takes them as one word,
`--staleness 0,1,2`: words would not say where they end and MODEL begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from p3o_jax.tasks.faults import UnusableRows

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from p3o_jax.devices.precision import Precision
    from p3o_jax.policies import LoadedPolicy
    from p3o_jax.sampler import Sampling

OptionalCount = Annotated[int | None, arg(metavar="N")]
Directory = Annotated[Path | None, arg(metavar="DIR")]


def one_word(of: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec[Any]:
    """Describes an option whose values are one word, with commas between them."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar},...",
        instance_from_str=lambda words: tuple(map(of, words[0].split(","))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [",".join(map(str, values))],
    )


Words = Annotated[tuple[str, ...], one_word(str, "A,B")]
Counts = Annotated[tuple[int, ...], one_word(int, "N,M")]
Numbers = Annotated[tuple[float, ...], one_word(float, "X,Y")]


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which model, and how it is read."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A run's directory (its newest checkpoint; RUN@STEP, RUN@best: another), a directory in Hugging Face format, a
    .gguf file, smollm2-135m, or random:EXPERIMENT[:VARIANT], that experiment's model as it is initialised."""
    chat: bool = True
    """Of a published model: put prompts into its chat template, if it has one."""
    system_prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """Of a published model: what the system says first."""
    trust: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg(metavar="MODULE")] = ()
    """A module that a run's config.json may name, besides p3o_jax's own: it is imported, and so run. It is looked for
    where Python looks, in the working directory, and where the run found it. May be given again."""

    def open(self, mesh: Mesh) -> LoadedPolicy:
        """Loads the model onto a mesh.

        Raises:
            FileNotFoundError: there is no such model, run or checkpoint.
            ValueError: it cannot be read, or there is no such experiment.
        """
        from p3o_jax.commands.lookup import configuration
        from p3o_jax.commands.trust import make_findable
        from p3o_jax.policies import find_checkpoint, load_policy, random_policy

        kind, _, experiment = self.model.partition(":")
        if kind == "random":
            return random_policy(self.model, configuration(experiment), mesh)
        checkpoint = find_checkpoint(self.model)
        make_findable(self.trust, None if checkpoint is None else checkpoint.parents[1])
        return load_policy(self.model, mesh, chat=self.chat, system_prompt=self.system_prompt, trusted=self.trust)


@dataclass(frozen=True, kw_only=True)
class SamplingArguments:
    """How responses are drawn."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: OptionalCount = None
    """Only the so many most likely tokens."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that has this mass."""
    min_p: float = 0.0
    """Only tokens at least so many times as likely as the most likely one."""
    precision: Annotated[str | None, arg(metavar="WEIGHTS[/...]")] = None
    """The sampler's: WEIGHTS[@tensor | @BLOCK][+PART...][/ACTIVATIONS[/KV_CACHE]]; what is left out is bfloat16.
    Default: float32 on a CPU, else bfloat16."""

    def sampling(self) -> Sampling:
        """Checks the settings.

        Raises:
            ValueError: one that is impossible.
        """
        from p3o_jax.sampler import Sampling

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def formats(self) -> Precision:
        """Reads the precision.

        Raises:
            ValueError: there is no such format.
        """
        import jax

        from p3o_jax.devices.precision import parse

        return parse(self.precision or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class RowArguments:
    """How the rows of a task, and what is answered to them, are judged."""

    unusable_rows: UnusableRows | None = None
    """What becomes of rows without text or answer, whose text the tokenizer refuses, or whose answer the reward cannot
    judge: refuse all, or leave_out such rows. Default: as the task says, which refuses if it is not told otherwise."""
    verifier_timeout_seconds: float = 5.0
    """A verifier that takes longer is killed, and what it was to judge counted as failed."""
