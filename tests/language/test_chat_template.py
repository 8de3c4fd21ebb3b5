"""`render`: the same text as transformers, and no template that runs for ever, fills the memory or reaches beyond its variables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from language_model import make_tokenizer
from packaging.version import Version
from transformers.utils.chat_template_utils import render_jinja_template

from halfbyte.errors import ArgumentError, CheckpointError
from halfbyte.language import render, template_limits

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be brief. <&> "é"'},
    {"role": "user", "content": "Hello\n there"},
    {
        "role": "assistant",
        "content": "Hi!",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "ü<", "n": [1, 2.5]}}}],
    },
    {"role": "tool", "name": "f", "content": "3"},
    {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d 'q'", "parameters": {"type": "object", "properties": {}}}}]
# Each shows something that chat templates do.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{{ part.text | default('<image>') }}
    {%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "blocks": """{% for m in messages %}
  {% if loop.first %}
    {{ bos_token }}
  {% elif loop.last and not loop.first %}
    last {{ loop.index0 }} {{ loop.length }} {{ loop.previtem.role }}
  {% endif %}
  {% if m.role == 'tool' %}{% continue %}{% endif %}
  {{ m.role | upper | trim }}{{ eos_token }}
{% endfor %}""",
    "namespace": """{% set ns = namespace(found=false, text='', self=1) %}{% for m in messages[::-1] %}
{% set index = (messages|length - 1) - loop.index0 %}
{% if m.role == 'user' and not ns.found %}{% set ns.found = true %}{% set ns.text = ns.text ~ index ~ m.role %}{% endif %}
{% if index < 2 %}{% break %}{% endif %}{% endfor %}{{ ns.text }} {{ ns.found }}""",
    "tools": """{% if tools %}{% for t in tools %}{{ t | tojson }}|{{ t.function | tojson(indent=4) }}
|{{ t|tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}{% endif %}{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}
{%- for key, value in call.function.arguments.items() %}<{{ key }}={{ value | string }}>{% endfor %}{% endfor %}{% endfor %}""",
    "macros": """{%- macro show(value, depth=0) -%}{%- if value is mapping -%}{ {%- for key, item in value|dictsort -%}{{ key }}
: {{ show(item, depth + 1) }}
{%- if not loop.last %}, {% endif %}{%- endfor -%} }{%- elif value is iterable and value is not string -%}
[{%- for item in value %}{{ show(item, depth + 1) }}{% endfor -%}]{%- else -%}{{ value ~ '@' ~ depth }}{%- endif -%}{%- endmacro -%}
{{ show(messages) }}{% macro wrapped() %}<{{ caller('y') }}>{% endmacro %}{% call(x) wrapped() %}{{ x }}{% endcall %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}
{% endif %}{% endfor %}""",
    "filters": """{{ messages | map(attribute='role') | unique | join(', ') }}
 {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('name', 'defined') | map(attribute='role') | list }} {{ [3, 1, 2] | sort | join }} {{ [1, 2] | sum }}
 {{ 'a-b' | replace('-', '+') }}
{{ 'x' | indent(4, true) }} {{ 'abc' | center(9) }}{{ '%s=%d' | format('a', 5) }}{{ '%5.2f' % 1.5 }}{{ 'a{}{:>5}{{}}
'.format(1, 'b') }}{{ 2 ** 10 }}{{ 'ab' * 3 }}
{{ 'a,b'.split(',') }}{{ 'a b'.strip().split(' ')[-1] }}{{ 'x'.join(['a', 'b']) }}{{ ' a'.lstrip() }}{{ 'abc'[1:] }}
{{ 'aXb'.replace('X', '--') }}{{ (7 / 2) | round | int }}
{{ range(3) | list }}{{ dict(a=1).a }}{{ {'a': 1}.get('b', 2) }}{{ 'é' | tojson }}{{ 1 if none is none else 2 }}{{ undefined_thing }}
{{ 'A' in 'ABC' }}{{ (1, 2)[0] }}
{{ {'b': 1, 'a': 2} | items | list }}{{ 'a\\n  b' | trim }}{{ ['a'] + ['b'] }}{{ 'AbC' | lower | capitalize | title }}{{ '<&>' | e }}
{{ -5 | abs }}{{ '%d {}' % 1700000000000 }}{{ '{:,}'.format(1700000000000) }}{{ 7 // 2 }}{{ 7 % 4 }}""",
    "recursive": """{% for part in tree recursive %}{{ part.a }}{% if part.c %}({{ loop(part.c) }}){% endif %}{% endfor %}""",
    "filtered": """{% for m in messages if m.role in ['user', 'tool'] and 1 < 2 <= 2 %}{{ loop.index }}{{ m.role }}{% else %}
none{% endfor %}""",
    "set block": """{% set x %}{{ messages[0].role }}!{% endset %}{{ x }}{% filter upper %}a{{ x }}{% endfilter %}{% block b %}
{{ bos_token }}{% endblock %}""",
    "raised": """{% if messages[0].role == 'none' %}{{ raise_exception('no') }}{% endif %}{{ enable_thinking }}{{ documents }}
{{ tools is none }}""",
}
TREE = [{"a": 1, "c": [{"a": 2, "c": [{"a": 3}]}, {"a": 4}]}, {"a": 5}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_same_text_as_transformers(name: str, prompt: bool) -> None:
    settings: dict[str, Any] = {"tools": TOOLS, "documents": None, "add_generation_prompt": prompt, "tree": TREE, "enable_thinking": False}
    settings |= {"bos_token": "<s>", "eos_token": "</s>"}
    expected: Any = render_jinja_template
    wanted = expected([CHAT], chat_template=TEMPLATES[name], **settings)[0][0]
    assert wanted.strip()
    assert render(TEMPLATES[name], CHAT, **settings) == wanted


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="older versions pass messages on as they are")
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_and_keys_without_value(name: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{{ m.thinking }}{{ m.content is defined }}{% endfor %}"
    )
    chat: list[Any] = [{"role": "assistant", "content": None, name: "so"}, {"role": "user", "content": "x", "reasoning": None}]
    wanted = tokenizer.apply_chat_template(chat, tokenize=False)
    assert render(tokenizer.chat_template, chat, add_generation_prompt=False) == wanted


def test_objects_become_plain_values() -> None:
    class Text(str):
        def secret(self) -> str:
            return "x"

    chat = [{"role": Text("user"), "content": Path("file"), "flag": True, "pair": (1, None)}]
    assert render("{{ messages }}", chat) == "[{'role': 'user', 'content': '<PosixPath>', 'flag': True, 'pair': (1, None)}]"
    assert render("{{ messages[0].role.secret is defined }}", chat) == "False"


def test_now() -> None:
    assert render("{{ strftime_now('%Y') }}", CHAT) in {str(int(time.strftime("%Y")) + i) for i in (-1, 0, 1)}


def test_without_special_tokens() -> None:
    assert render("{{ bos_token }}|{{ eos_token is defined }}", CHAT) == "|False"


def test_many_messages() -> None:
    """A thousand take a fraction of what is allowed, and not much time."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"text {i} " * 40} for i in range(1000)]
    start = time.process_time()
    text = render(TEMPLATES["chatml"], chat)
    assert time.process_time() - start < 2
    assert text.count("<|im_start|>") == 1001


MANY = "range(100000)"
# All that take for ever or make gigabytes without the limits; what is said of them.
HOSTILE = {
    "nested loops": (f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}", "steps"),
    "filtered loops": (f"{{% for a in {MANY} %}}{{% for b in {MANY} if false %}}{{% endfor %}}{{% endfor %}}", "steps"),
    "a recursive loop": ("{% for a in [1,1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "RecursionError"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "steps",
    ),
    "text in loops": ("{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}", "characters"),
    "text in a macro": (
        "{% macro f() %}" + "x" * 9999 + "{% endmacro %}{% set x %}{% for a in range(99999) %}{{ f() }}{% endfor %}{% endset %}",
        "characters",
    ),
    "doubled by ~": ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
    "doubled by +": ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
    "doubled lists": ("{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
    "doubled by printing": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
        "characters",
    ),
    "doubled by a filter": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
        "characters",
    ),
    "doubled by a method": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "characters",
    ),
    "doubled by join": ("{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x|join(n.x) %}{% endfor %}", "characters"),
    "doubled by a method join": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
        "characters",
    ),
    "a product": ("{{ 'a' * 10000000000 }}", "characters"),
    "a product of a list": ("{% set x = [1] * 10000000000 %}", "characters"),
    "a power": ("{{ 10 ** (10 ** 10) }}", "digits"),
    "squares": ("{% set n = namespace(x=10) %}{% for i in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}", "digits"),
    "ljust": ("{{ 'a'.ljust(10000000000) }}", "characters"),
    "zfill": ("{{ 'a'.zfill(width=10000000000) if false else 'a'.zfill(10000000000) }}", "characters"),
    "expandtabs": ("{{ '\t'.expandtabs(2000000000) }}", "characters"),
    "translate": ("{{ ('a' * 99999).translate({97: 'b' * 99999}) }}", "characters"),
    "to_bytes": ("{{ (1).to_bytes(10000000000, 'big') }}", "characters"),
    "center": ("{{ 'a'|center(10000000000) }}", "characters"),
    "indent": ("{{ 'a\nb'|indent(10000000000) }}", "characters"),
    "indent of JSON": ("{{ {'a': 1}|tojson(indent=10000000000) }}", "indents JSON"),
    "batch": ("{{ [1]|batch(10000000000, 'x')|list }}", "characters"),
    "slice": ("{{ [1]|slice(10000000000)|list }}", "characters"),
    "round": ("{{ 1.5|round(1000000000, 'ceil') }}", "characters"),
    "printf": ("{{ '%1000000000d' % 5 }}", "a width of 10000 or more"),
    "printf with a star": ("{{ '%*d' % (1000000000, 5) }}", "a width of 10000 or more"),
    "printf with precision": ("{{ '%.1000000000f' % 5 }}", "a width of 10000 or more"),
    "the filter format": ("{{ '%1000000000d'|format(5) }}", "a width of 10000 or more"),
    "the method format": ("{{ '{:1000000000}'.format(5) }}", "a width of 10000 or more"),
    "a computed width": ("{{ '{:{w}}'.format(5, w=1000000000) }}", "a width of 10000 or more"),
    "a list of lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "steps",
    ),
    "comparison of lists of lists": (
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
        "{% if n.x == n.y %}{% endif %}",
        "steps",
    ),
    "JSON of lists of lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{% set y = n.x|tojson %}",
        "steps",
    ),
    "a key of tuples of tuples": (
        "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{% set y = {n.x: 1} %}",
        "steps",
    ),
    "an index of tuples of tuples": (
        "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{% set y = {}[n.x] %}",
        "steps",
    ),
    "a message of lists of lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ raise_exception(n.x) }}",
        "steps",
    ),
    "slices of a long text": (
        "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% set y = x[::2] %}{% endfor %}",
        "characters",
    ),
    "upper case of a long text": (
        "{% set x = 'a' * 9000000 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
        "characters",
    ),
    "comparison of long texts": (
        "{% set x = 'a' * 9000000 %}{% set y = 'a' * 9000000 %}{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
        "steps",
    ),
    "a sum of lists": ("{% set x = [[1], [2]]|sum(start=[]) %}", "adds up lists"),
    "sums of lists": ("{% set x = range(99999)|batch(1)|sum(start=[]) %}", "steps"),
    "a long range": ("{% for i in range(10000000000) %}{% endfor %}", "Range too big"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_templates_that_run_for_ever_or_fill_the_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, why = HOSTILE[name]
    monkeypatch.setattr(template_limits.Limits.__init__, "__defaults__", (100_000, 20_000_000, 30.0))  # as the others, sooner
    start = time.process_time()
    with pytest.raises(CheckpointError, match="characters|steps" if why in ("characters", "steps") else why) as error:
        render(template, [{"role": "user", "content": "x"}])
    assert time.process_time() - start < 5
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("the chat template ")


def test_a_template_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits.Limits.__init__, "__defaults__", (5_000_000, 20_000_000, 0.05))
    with pytest.raises(CheckpointError, match=r"was stopped because it takes more than 0\.05 seconds: take the one of the model's authors"):
        render(HOSTILE["nested loops"][0], CHAT)


def test_the_limits_grow_with_the_conversation() -> None:
    text = "a" * 2_000_000
    assert len(render("{% for m in messages %}{{ m.content }}{% endfor %}", [{"role": "user", "content": text}] * 20)) == 40_000_000


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ messages['__class__'].x }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages.clear() }}",
        "{{ dict.mro() }}",
        "{% set n = namespace(_x=1) %}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ [].__len__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ loop }}{% for a in [1] %}{{ loop._iterable }}{{ loop._undefined.x }}{% endfor %}{{ joiner.__init__.__globals__ }}",
        "{{ (messages|tojson).format.__self__ }}",
    ],
)
def test_templates_that_reach_out(template: str) -> None:
    chat = [{"role": "user", "content": "x"}]
    try:
        text = render(template, chat)
    except CheckpointError as e:
        text = str(e).partition("the chat template does not take this conversation (")[0]
    assert text == ""  # an error, or an undefined attribute, which is no text
    assert chat == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('only user and assistant roles') }}", "TemplateError: only user and assistant roles"),
        ("{% if %}", "TemplateSyntaxError: Expected an expression"),
        ("{{ messages[0].a.b }}", "UndefinedError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "Error"),
        ("{% if 1 %}" * 300 + "{% endif %}" * 300, "Error"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "Error"),
        ("{{ 1" + " ~ 1" * 2000 + " }}", None),
        ("{{ [" * 600 + "]" * 600 + " }}", "Error"),
    ],
)
def test_errors_of_a_template(template: str, why: str | None) -> None:
    if why is None:
        render(template, CHAT)
        return
    with pytest.raises(CheckpointError, match="the chat template does not take this conversation") as error:
        render(template, CHAT)
    assert why in str(error.value)
    assert str(error.value).endswith("): change the messages, or repair it")


def test_what_is_no_conversation() -> None:
    with pytest.raises(ArgumentError, match="a conversation has one message or more, got none: pass a message"):
        render("x", [])
    for messages in ("a", {"role": "user"}, ["a"], None):
        with pytest.raises(ArgumentError, match=r"messages are a list of dicts, got .*: pass one dict for each of them"):
            render("x", messages)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tools are a list of dicts, got list"):
        render("x", CHAT, tools=[print])  # type: ignore[list-item]
    deep: dict[str, Any] = {"role": "user"}
    deep["content"] = deep
    with pytest.raises(CheckpointError, match="RecursionError"):
        render("x", [deep])


def test_a_template_of_a_megabyte() -> None:
    with pytest.raises(CheckpointError, match="the chat template has 2000000 characters, at most 1048576 are read: take the model's own"):
        render("x" * 2_000_000, CHAT)
