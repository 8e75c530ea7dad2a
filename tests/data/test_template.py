"""The marks do not change the text, spans are exact for many kinds of templates, and what cannot be proven is refused."""

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from burnish.data.frames import UnprovenError
from burnish.data.markers import BY_MARKERS
from burnish.data.template import MarkedTemplate
from burnish.data.turns import TurnFinder
from tests.data.families import FAMILIES
from tests.data.tokenizing import CHATML, read
from tests.toys import T1, T2, T3, chat

LOOP = "{% for m in messages %}"
BODY = CHATML.removeprefix(LOOP).partition("{% endfor %}")[0]
PROMPT = CHATML.partition("{% endfor %}")[2]
FOUR = ("u one", "a one", "u two", "a two", "u three", "a three")


def finder(source, **variables):
    template = MarkedTemplate(_compile_jinja_template(source), source=source)
    variables = {"bos_token": "<s>", "eos_token": "<|im_end|>", **variables}
    return TurnFinder(template, variables=variables, special_tokens=["<|im_start|>", "<|im_end|>", "<s>"])


def spans(source, row, *, turns=None, **variables):
    found = read(row)
    text, places, _ = finder(source, **variables).find(found, turns=found.trainable if turns is None else turns)
    return [text[start:stop] for start, stop in places]


RIGHT = {
    "plain": CHATML,
    "default system inside the loop": T3,
    "filtered loop": "{% for m in messages if m.role != 'tool' %}" + BODY + "{% endfor %}" + PROMPT,
    "continue": LOOP + "{% if m.role == 'system' %}{% continue %}{% endif %}" + BODY + "{% endfor %}" + PROMPT,
    "by number": "{% for i in range(messages | length) %}{% set m = messages[i] %}" + BODY + "{% endfor %}" + PROMPT,
    "scan before": LOOP.replace("messages", "messages[::-1]") + "{% endfor %}" + CHATML,
    "macro": "{% macro turn(m) %}" + BODY + "{% endmacro %}" + LOOP + "{{ turn(m) }}{% endfor %}" + PROMPT,
    "loop in a macro": "{% macro all(messages) %}"
    + LOOP
    + BODY
    + "{% endfor %}{% endmacro %}{{ bos_token }}{{ all(messages) }}"
    + PROMPT,
    "set block inside": LOOP + "{% set x %}" + BODY + "{% endset %}{{ x }}{% endfor %}" + PROMPT,
    "set block around": "{% set x %}" + LOOP + BODY + "{% endfor %}{% endset %}{{ x }}" + PROMPT,
    "another end at the end": LOOP + BODY + "{% if loop.last %}{{ '<s>' }}{% endif %}{% endfor %}" + PROMPT,
    "no generation prompt": LOOP + BODY + "{% endfor %}",
    "needs a user": "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('') }}{% endif %}"
    + CHATML,
    "markers with the newline in": LOOP
    + "{{ '<|im_start|>' + m.role + '\\n' }}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}{% endfor %}"
    + PROMPT,
    "look ahead": LOOP + "{% for n in messages[loop.index:] %}{% endfor %}" + BODY + "{% endfor %}" + PROMPT,
}


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_every_assistant_turn_is_found(source):
    assert spans(source, chat(*FOUR)) == ["a one<|im_end|>", "a two<|im_end|>", "a three<|im_end|>"]


def test_text_that_the_template_changes_is_found_as_it_is_written():
    source = CHATML.replace("m['content']", "(m['content'] | trim | upper)")
    assert spans(source, chat("u", "  yes ")) == ["YES<|im_end|>"]


REFUSED = {
    "trimmed as a whole": ("{% set x %}" + LOOP + BODY + "{% endfor %}{% endset %}{{ x | trim }}", "outside any loop"),
    "filter block": ("{% filter trim %}" + LOOP + BODY + "{% endfor %}{% endfilter %}", "outside any loop"),
    "copied messages": (
        "{% set ns = namespace(l=[]) %}"
        + LOOP
        + "{% set ns.l = ns.l + [dict(role=m.role, content=m.content)] %}{% endfor %}"
        "{% for m in ns.l %}" + BODY + "{% endfor %}",
        "outside any loop",
    ),
    "last one unrolled": (
        "{% for m in messages[:-1] %}" + BODY + "{% endfor %}{% set m = messages[-1] %}" + BODY,
        "outside any loop",
    ),
    "all as JSON": ("{{ messages | tojson }}", "outside any loop"),
    "collected": (
        "{% set ns = namespace(t='') %}"
        + LOOP
        + "{% set ns.t = ns.t + m.role + m.content + '<|im_end|>' %}{% endfor %}{{ ns.t }}",
        "outside any loop",
    ),
    "written twice": ("{{ messages[-1].content }}" + CHATML, "outside its own turn"),
    "user text before the answer": (
        LOOP
        + "{% if m.role == 'assistant' %}{{ messages[loop.index0 - 1].content }}"
        + BODY
        + "{% endif %}{% endfor %}",
        "another message's text",
    ),
    "next header in the turn": (
        "{{ '<|im_start|>' + messages[0].role + '\\n' }}" + LOOP + "{{ m.content + '<|im_end|>\\n' }}"
        "{% if not loop.last %}{{ '<|im_start|>' + messages[loop.index0 + 1].role + '\\n' }}{% endif %}{% endfor %}",
        "text after the terminator",
    ),
    "closed only at the end": (
        LOOP + "{{ m.role + m.content }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}",
        "leaves others open",
    ),
    "content left out": (
        LOOP + "{{ '<|im_start|>' + m.role + '<|im_end|>' }}{% endfor %}",
        "overlap|leaves its content out",
    ),
}


@pytest.mark.parametrize(("source", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_proven_is_refused(source, reason):
    with pytest.raises(UnprovenError, match=reason):
        spans(source, chat(*FOUR))


@pytest.mark.parametrize("change", ["", " | upper", " | title", " | trim"])
def test_a_template_that_copies_a_users_text_into_a_late_turn_is_refused(change):
    copy = f"(' [re: ' + (messages[0].content{change}) + ']' if m.role == 'assistant' and loop.index0 > 4 else '')"
    source = CHATML.replace("m['content'] +", f"m['content'] + {copy} +")
    assert spans(source, chat(*FOUR[:4])) == ["a one<|im_end|>", "a two<|im_end|>"]
    with pytest.raises(UnprovenError, match="message 5: the template writes text of message 0 into this turn"):
        spans(source, chat(*FOUR))
    assert spans(source, chat(*FOUR), turns=[1, 3]) == ["a one<|im_end|>", "a two<|im_end|>"]


def test_a_template_that_repeats_a_late_answer_is_refused():
    again = "{% if messages | length > 5 %}{{ messages[1].content }}{% endif %}"
    assert len(spans(again + CHATML, chat(*FOUR[:4]))) == 2
    with pytest.raises(UnprovenError, match="message 1: the template writes its text outside its own turn too"):
        spans(again + CHATML, chat(*FOUR))


def test_control_tokens_in_the_text_move_nothing():
    row = chat(
        "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n",
        "real<|im_end|>\n",
        "assistant\n",
        "<|im_start|>assistant\n",
    )
    assert spans(CHATML, row) == ["real<|im_end|>\n<|im_end|>", "<|im_start|>assistant\n<|im_end|>"]


def test_letters_that_grow_when_lowered_move_nothing():
    row = chat("İ" * 50, "a" * 10, "İ" * 9, "b" * 10)
    assert spans(CHATML, row) == ["a" * 10 + "<|im_end|>", "b" * 10 + "<|im_end|>"]


def test_what_the_generation_prompt_supplies_is_header():
    source = FAMILIES["qwen3"].template
    assert spans(source, chat("u", "a")) == ["<think>\n\n</think>\n\na<|im_end|>"]
    assert spans(source, chat("u", "a", "v", "b"), enable_thinking=False) == ["a<|im_end|>", "b<|im_end|>"]
    thought = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "thinking": "hm"}]}
    assert spans(source, thought) == ["<think>\nhm\n</think>\n\na<|im_end|>"]


def test_tool_turns():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "done"},
    ]
    shown = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    think = "<think>\n\n</think>\n\n"
    found = spans(FAMILIES["qwen3"].template, {"messages": messages})
    assert found == [f"{think}{shown}\n{shown}<|im_end|>", f"{think}done<|im_end|>"]
    found = spans(FAMILIES["deepseek"].template, {"messages": messages})
    assert found == ['<|call|>f\n{"x": 1}' * 2 + "<|im_end|>", "done<|im_end|>"]


@pytest.mark.parametrize("source", [T1, T2, T3, CHATML, *RIGHT.values(), *(f.template for f in FAMILIES.values())])
def test_marks_do_not_change_the_text(source):
    plain = _compile_jinja_template(source)
    row = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, FOUR, strict=True)]
    variables = {"bos_token": "<s>", "eos_token": "<e>", "tools": None}
    expected = plain.render(messages=row, add_generation_prompt=False, **variables)
    assert MarkedTemplate(plain, source=source).render(row, **variables).text == expected


MARKED = "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
COPIED = (
    "{% set ns = namespace(l=[]) %}"
    + LOOP
    + "{% set ns.l = ns.l + [dict(role=m.role, content=m.content)] %}{% endfor %}{% for m in ns.l %}"
)
WITH_MARKERS = {
    "the newline after the end inside": COPIED + MARKED + "{% endfor %}" + PROMPT,
    "the header inside": COPIED
    + MARKED.replace(
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}",
        "{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>' + m.role + '\\n' }}",
    ).replace("{% else %}", "{% else %}{{ '<|im_start|>' + m.role + '\\n' }}")
    + "{% endfor %}"
    + PROMPT,
    "the end outside": COPIED
    + MARKED.replace(
        "m.content + '<|im_end|>\\n' }}{% endgeneration %}", "m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}"
    )
    + "{% endfor %}"
    + PROMPT,
    "last one unrolled": "{% for m in messages[:-1] %}"
    + MARKED
    + "{% endfor %}{% set m = messages[-1] %}"
    + MARKED
    + PROMPT,
}


@pytest.mark.parametrize("source", WITH_MARKERS.values(), ids=WITH_MARKERS)
def test_markers_serve_where_loops_do_not(source):
    assert spans(source, chat(*FOUR)) == ["a one<|im_end|>", "a two<|im_end|>", "a three<|im_end|>"]
    assert spans(source, chat(*FOUR), turns=[5]) == ["a three<|im_end|>"]
    assert spans(source, chat("q", "x<|im_end|>\n")) == ["x<|im_end|>\n<|im_end|>"]
    found = finder(source)
    found.find(read(chat("q", "a")), turns=[1])
    assert found.notices == {BY_MARKERS}


NOT_BY_MARKERS = {
    "one for all turns": (
        COPIED.replace("{% for m in ns.l", "{% generation %}{% for m in ns.l")
        + BODY
        + "{% endfor %}{% endgeneration %}"
        + PROMPT,
        "1 generation markers for 3",
    ),
    "no generation prompt": (WITH_MARKERS["the header inside"].removesuffix(PROMPT), "generation prompt"),
    "nothing closes": (
        WITH_MARKERS["the end outside"].replace("{{ '<|im_end|>\\n' }}", "{{ '\\n' }}"),
        "no special token closes",
    ),
    "a user's text inside": (
        WITH_MARKERS["the end outside"].replace(
            "m.content }}{% endgen", "m.content + (ns.l[0].content if loop.index > 5 else '') }}{% endgen"
        ),
        "message 0: its text is not where",
    ),
    "fewer than turns": (
        WITH_MARKERS["the end outside"].replace("m.role == 'assistant'", "m.role == 'assistant' and loop.index < 5"),
        "2 generation markers for 3",
    ),
}


@pytest.mark.parametrize(("source", "reason"), NOT_BY_MARKERS.values(), ids=NOT_BY_MARKERS)
def test_markers_that_prove_nothing_are_refused(source, reason):
    with pytest.raises(UnprovenError, match=f"outside any loop.*; .*{reason}"):
        spans(source, chat(*FOUR))


def test_a_template_that_takes_only_parts_gets_parts():
    source = CHATML.replace(
        "m['content']", "(m['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
    )
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ]
    }
    assert spans(source, row) == ["a<|im_end|>"]
    quiet = CHATML.replace("m['content']", "(m['content'][0]['text'] if m['content'] is not string else '')")
    assert spans(quiet, row) == ["a<|im_end|>"]


def test_text_that_the_template_leaves_out_is_told():
    found = finder("{% for m in messages if m.role != 'developer' %}" + BODY + "{% endfor %}" + PROMPT)
    turns = [("developer", "d"), ("user", "q"), ("assistant", "a")]
    found.find(read({"messages": [{"role": role, "content": text} for role, text in turns]}), turns=[2])
    assert found.notices == {"the chat template leaves out the text of some developer turns"}


def test_a_template_that_looks_for_a_word_is_tried_with_it_and_without():
    copy = "(messages[0].content if '[why]' in m.content else '')"
    found = finder(CHATML.replace("m['content'] +", f"m['content'] + {copy} +"))
    assert found.find(read(chat("q", "plain")), turns=[1]).spans
    with pytest.raises(UnprovenError, match="text of message 0 into this turn"):
        found.find(read(chat("q", "a and a [why]")), turns=[1])
    assert not found.find(read(chat("q", "other")), turns=[1]).is_new


def test_a_template_that_needs_content_gets_an_empty_one():
    source = FAMILIES["qwen3"].template.replace("m.content if m.content is string else ''", "m.content + ''")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    shown = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert spans(source, {"messages": turns}) == [f"<think>\n\n</think>\n\n{shown}<|im_end|>"]


def test_a_template_without_a_form_for_calls_is_told():
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    asked = {"role": "user", "content": "q"}
    for content, reason in (("", "leaves its content out"), ("I look.", "leaves its tool calls out")):
        with pytest.raises(UnprovenError, match=f"message 1: the template {reason}"):
            spans(CHATML, {"messages": [asked, {"role": "assistant", "content": content, "tool_calls": [call]}]})
