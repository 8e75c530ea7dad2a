"""Chat templates in the manner of well-known families, short, with the text that each one's assistant turn must give."""

from dataclasses import dataclass

GENERATE = "{% if add_generation_prompt %}"
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role in ('user', 'system') %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{- ('\\n' if content or not loop.first else '') }}"
    '{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    + GENERATE
    + "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    + GENERATE
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    + GENERATE
    + "{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    + GENERATE
    + "{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{% set ns = namespace(tool=false) %}{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m['content'] }}"
    "{% elif m['role'] == 'tool' %}{{ '' if ns.tool else '<|outputs|>' }}{% set ns.tool = true %}{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}"
    "{% if m['tool_calls'] %}{{ '<|Assistant|>' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] %}{{ '<|call|>' + c['function']['name'] + '\\n' + c['function']['arguments'] }}{% endfor %}"
    "{{ eos_token }}"
    "{% elif ns.tool %}{{ '<|/outputs|>' + m['content'] + eos_token }}{% set ns.tool = false %}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<|Assistant|>' }}{% endif %}"
)
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a small and helpful model<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    + GENERATE
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] %}"
    "{%- else %}{%- set first = 'You are helpful.' %}{%- endif %}"
    "{{- '<|im_start|>system\\n' + first }}{%- if tools %}{{- '\\n\\n# Tools' }}{%- for t in tools %}{{- '\\n' + (t | tojson) }}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>' + m.role }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for c in m.tool_calls %}{%- set c = c.function %}"
    "{{- '\\n<tool_call>\\n{\"name\": \"' + c.name + '\", \"arguments\": ' }}{{- c.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}" + GENERATE + "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
GRANITE = (
    "{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set first = 'Answer as a helpful assistant.' %}{%- set rest = messages %}{%- endif %}"
    "{{- '<|start_of_role|>system<|end_of_role|>' + first + '<|end_of_text|>\\n' }}"
    "{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- for m in rest %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}"
    "{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A template, the tokens it needs, and what it makes of ``answer`` in an earlier and in the last turn."""

    template: str
    specials: tuple[str, ...]
    close: str
    bos: str = "<s>"
    eos: str = "<|im_end|>"
    last: str = ""
    before: str = ""

    def target(self, content: str, *, last: bool) -> str:
        own = content.strip() if "| trim" in self.template else content
        own = own.lstrip("\n") if last and self.last else own
        return self.before + (self.last if last else "") + own + self.close


FAMILIES = {
    "smollm2": Family(SMOLLM2, (), "<|im_end|>"),
    "qwen2.5": Family(QWEN25, (), "<|im_end|>"),
    "granite": Family(
        GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>", eos="<|end_of_text|>"
    ),
    "qwen3": Family(QWEN3, (), "<|im_end|>", last="<think>\n\n</think>\n\n"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Family(MISTRAL, ("</s>", "[INST]", "[/INST]"), "</s>", eos="</s>", before=" "),
    "gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", bos="<bos>"),
    "phi3": Family(
        PHI3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"), "<|end|>", eos="<|endoftext|>"
    ),
    "deepseek": Family(
        DEEPSEEK,
        ("<|User|>", "<|Assistant|>", "<|outputs|>", "<|/outputs|>", "<|call|>", "<|eos|>"),
        "<|eos|>",
        eos="<|eos|>",
    ),
}
