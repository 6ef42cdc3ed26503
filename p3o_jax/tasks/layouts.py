r"""Published mathematics datasets, by the layout of their files: each function makes a `Dataset` of a path to them.

How to download them is in docs/tasks.md. The instruction that is added to prompts asks for `\boxed{}`, except where
the published prompts have one of their own.
"""

from __future__ import annotations

from p3o_jax.rewards.mathematics import MathVerify
from p3o_jax.tasks.dataset import Dataset
from p3o_jax.tasks.records import open_records

_BOXED = "\n\nReason step by step, and put the final answer in \\boxed{}."


def gsm8k(path: str = "", evaluation_path: str = "") -> Dataset:
    """`question`, and `answer` with the solution and, after ####, the number (arXiv:2110.14168)."""
    return Dataset(path, evaluation_path, "question", "answer", after=_BOXED, label="gsm8k", prompt_tokens=512)


def math(path: str = "", evaluation_path: str = "") -> Dataset:
    r"""`problem`, and `solution` with the answer in \boxed{} (arXiv:2103.03874); also a directory of its JSON files."""
    return Dataset(path, evaluation_path, "problem", "solution", after=_BOXED, label="math", reward=MathVerify())


def math500(evaluation_path: str) -> Dataset:
    """`problem`, and `answer` in LaTeX: the 500 problems of MATH that are evaluated on (arXiv:2305.20050)."""
    return Dataset("", evaluation_path, "problem", "answer", after=_BOXED, label="math500", reward=MathVerify())


def deepscaler(path: str = "", evaluation_path: str = "") -> Dataset:
    """`problem` and `answer` in LaTeX: DeepScaleR-Preview-Dataset, an array of 40,000 rows."""
    return Dataset(path, evaluation_path, "problem", "answer", after=_BOXED, label="deepscaler", reward=MathVerify())


def dapo_math(path: str = "", evaluation_path: str = "") -> Dataset:
    """A chat in `prompt`, whose message has its own instruction to end with "Answer: ...", and an integer in
    `reward_model.ground_truth`: DAPO-Math-17k (arXiv:2503.14476), in whose file every row is there a hundred times."""
    return Dataset(path, evaluation_path, "prompt.0.content", "reward_model.ground_truth", label="dapo_math")


def aime(evaluation_path: str) -> Dataset:
    """Any of the published AIME files: `problem`, `Problem` or `question`, and `answer`, `Answer` or `solution`."""
    return _competition(evaluation_path, "aime")


def amc(evaluation_path: str) -> Dataset:
    """Any of the published AMC files: `problem` or `question`, and `answer`, which may be a float such as 142.0."""
    return _competition(evaluation_path, "amc")


def _competition(path: str, label: str) -> Dataset:
    file = open_records(path)[0]
    first = file[0]
    found = []
    for names in (("problem", "Problem", "question"), ("answer", "Answer", "solution")):
        there = [name for name in names if first.get(name) not in (None, "")]
        if not there:
            raise ValueError(f"{file.where(0)}: none of the columns {', '.join(names)}; there are {', '.join(first)}")
        found.append(there[0])
    return Dataset("", path, found[0], found[1], after=_BOXED, label=label)
