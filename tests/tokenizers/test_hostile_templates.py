"""Chat templates that take all memory, all time, or their process: refused by name, and the next one renders."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest

from p3o_jax.models.stored.pretrained import Pretrained, open_model
from p3o_jax.tokenizers import template_process
from p3o_jax.tokenizers.chat_template import ChatTemplate
from tests.models.stored_models import copy_with_tokenizer

pytest.importorskip("jinja2", reason="needs the extra 'models'")
MESSAGES = [{"role": "user", "content": "hello"}]
GOOD = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"})


def render(source: str, **options) -> str:
    return ChatTemplate(source, {}).render(MESSAGES, options)


MEMORY = [
    "{{ 'x' * 10**9 }}", "{{ [0] * 10**9 }}", "{{ '%1000000000d' % 1 }}", "{{ '{:1000000000d}'.format(1) }}",
    "{{ 'x'.zfill(2**40) }}", "{{ (2).to_bytes(10**10, 'big') }}", "{{ messages | tojson(indent=10**9) }}",
    "{{ 'a' | batch(10**9, 'x') | list }}", "{{ 'ab' | replace('', 'x' * 10**6) | replace('', 'y' * 10**6) }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{{ ['x' * 10**8] * 99 | join }}", "{{ 'a' | center(10**9) }}",
]  # fmt: skip
TEXT = ["{{ 'x' * 10**7 }}", "{{ 'x'.center(10**7) }}", "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}"]
TIME = [
    "{{ (10**9) ** (10**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]
WRONG = [
    "{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ strftime_now(3) }}", "{% include 'x' %}", "{% extends 'x' %}",
    "{% for i in range(10**9) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 50000 + "]" * 50000 + " }}", "{{ '\\ud800' }}",
    "{{ raise_exception('z\n' * 10**6) }}", "{{ [1] | sum(start=[]) }}", "{{ messages[7].content.x.y }}", "{{ x() }}",
]  # fmt: skip


@pytest.mark.parametrize("source", MEMORY + TEXT + WRONG, ids=lambda source: source[:40])
def test_a_template_that_takes_too_much_or_fails_is_one_line(source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ValueError, match=r"^the chat template (takes|renders|fails|refuses|ended|gave|is not)"
    ) as error:
        render(source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    if source in TEXT:
        assert "renders more than" in str(error.value)
    assert GOOD.render(MESSAGES) == "hello<s>"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # 128 MB, of this process


@pytest.mark.parametrize("source", TIME, ids=lambda source: source[:40])
def test_a_template_that_takes_all_time_is_ended(source):
    with pytest.raises(ValueError, match=r"the chat template takes more than 2 s of computing time"):
        render(source)
    assert GOOD.render(MESSAGES) == "hello<s>"


def test_what_one_template_leaves_behind_is_not_anothers_loss():
    """500 MB that were there for a moment, again and again; none is left."""
    for i in range(4):
        assert render(f"{{% set x = messages[0].content * (10**8 + {i}) %}}{{{{ x | length }}}}") == str(
            5 * (10**8 + i)
        )
        assert GOOD.render(MESSAGES) == "hello<s>"


def test_text_may_be_long_where_the_messages_are():
    long = [{"role": "user", "content": "é" * 5_000_000}]
    assert GOOD.render(long) == "é" * 5_000_000 + "<s>"


def test_names_that_every_template_is_given_are_not_options():
    with pytest.raises(ValueError, match="the template option messages is not free"):
        render("x", messages="y")
    with pytest.raises(ValueError, match="has 2000000 characters, more than"):
        ChatTemplate("x" * 2_000_000, {})


def test_a_process_that_was_killed_is_replaced():
    GOOD.render(MESSAGES)
    template_process._process._process.kill()
    with pytest.raises(ValueError, match="SIGKILL"):
        GOOD.render(MESSAGES)
    assert GOOD.render(MESSAGES) == "hello<s>"


def test_threads_get_their_own_answers():
    wrong = []

    def ask(i: int) -> None:
        for j in range(50):
            content = f"{i} {j}"
            if ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": content}]) != content:
                wrong.append(content)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_fork_has_a_process_of_its_own():
    GOOD.render(MESSAGES)
    before = template_process._process
    before.owner = -1  # as a forked process finds it
    assert GOOD.render(MESSAGES) == "hello<s>"
    assert template_process._process is not before
    before.owner = os.getpid()
    before.close()


def test_rendering_is_fast():
    """About 0.2 ms, in one process; the bound is for a busy machine."""
    GOOD.render(MESSAGES)
    before, start = template_process._process, time.perf_counter()
    for _ in range(200):
        GOOD.render(MESSAGES)
    assert template_process._process is before
    assert time.perf_counter() - start < 2


def test_a_directory_with_such_a_template_is_named(tmp_path):
    path = copy_with_tokenizer("qwen3", tmp_path)
    (path / "chat_template.jinja").write_text(MEMORY[0])
    with pytest.raises(ValueError, match="takes more than") as error:
        Pretrained(str(path)).tokenizer(open_model(str(path)))
    assert str(path) in str(error.value)
